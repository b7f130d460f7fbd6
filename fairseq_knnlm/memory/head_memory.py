"""A learned head as a memory."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..heads import Head
from ..keys import KeyExtractor
from .base import KeptLogProbs, Memory, MemoryFacts, MemoryScores

QUERIES_PER_PART = 1 << 12


class HeadMemory(Memory):
    """Predicts from trained rows instead of stored entries; every word of the vocabulary has some probability."""

    def __init__(
        self,
        head: Head,
        weight: float,
        name: str = "head",
        extractor: KeyExtractor | None = None,
        identity: dict[str, Any] | None = None,
        folder: str | None = None,
    ):
        """
        Args:
            weight: lambda
            name: of its folder
            identity: what makes two heads the same, for a saved run
        """
        self.head, self.weight, self.name, self.extractor = head, weight, name, extractor
        self.identity, self.folder = identity or {}, folder

    @property
    def title(self) -> str:
        return f"in the head {self.name}"

    @property
    def temperature(self) -> float:
        return self.head.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self.head.temperature = value

    @property
    def facts(self) -> MemoryFacts:
        kept = [self.temperature]
        return MemoryFacts("head", None, self.weight, 1 / self.temperature, self.identity, kept, self.folder)

    @torch.no_grad()
    def scores_in_parts(self, queries: Tensor, targets: Tensor, keep: bool = False) -> Iterator[MemoryScores]:
        for some, wanted in zip(queries.split(QUERIES_PER_PART), targets.split(QUERIES_PER_PART)):
            log_probs = self.head.target_log_probs(self.head.project(some), wanted.to(self.head.rows.device))
            kept = KeptLogProbs(log_probs[:, None].cpu()) if keep else None
            yield MemoryScores(log_probs.to(targets.device), kept=kept)

    @torch.no_grad()
    def vocabulary_log_probs(self, queries: Tensor, vocabulary_size: int) -> Tensor:
        log_probs = self.head.vocabulary_log_probs(self.head.project(queries))
        return F.pad(log_probs, (0, vocabulary_size - log_probs.size(1)), value=-torch.inf).to(queries.device)
