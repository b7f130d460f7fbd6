"""How many rows of the output embedding each word has: equally many, or more for frequent or difficult words.

    1x ... 9x       so many for every word
    frequency:3     1 + floor(log_b f) for a word that the datastore holds f times, 3 per word on average
    loss:3          likewise, f being the LM's total loss on the word

The base b is found by bisection (Xu et al. 2023, appendix C.1).
"""

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import KnnlmError

MOST = 64  # rows of one word on average; more would be a datastore again


@dataclass(frozen=True)
class RowSpec:
    """What ``--rows`` asks for."""

    by: str  # equal, frequency or loss
    average: float

    @classmethod
    def parse(cls, text: str) -> "RowSpec":
        found = re.fullmatch(r"(?:(\d+)x|(frequency|loss):(\d+(?:\.\d+)?))", text)
        if found is None:
            raise KnnlmError(f"--rows takes 1x to 9x, frequency:N or loss:N, as in frequency:3, not '{text}'")
        average = float(found[1] or found[3])
        if not 1 <= average <= MOST:
            raise KnnlmError(f"--rows must give each word 1 to {MOST} rows on average, not {average:g}")
        return cls(found[2] or "equal", average)

    def counts(self, frequencies: np.ndarray) -> np.ndarray:
        """Rows of each word, at least one: what each word counts (V,) -> (V,) int64."""
        if self.by == "equal":
            return np.full(len(frequencies), int(self.average), np.int64)
        return counts_for_total(frequencies, round(self.average * len(frequencies)))


def counts_for_total(frequencies: np.ndarray, total: int) -> np.ndarray:
    """1 + floor(log_b f), with the base b that comes nearest to ``total`` from below: (V,) -> (V,) int64."""
    logs = np.log(np.maximum(frequencies.astype(np.float64), 1.0))

    def rows(log_base: float) -> np.ndarray:
        return 1 + np.floor(logs / log_base + 1e-12).astype(np.int64)

    low, high = 1e-4, max(float(logs.max()), 1e-4) * 2  # too many rows; one for each word
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rows(middle).sum() > total else (low, middle)
    return rows(high)


class RowLayout:
    """Which rows belong to which word: those of word y are starts[y] .. starts[y + 1] - 1."""

    def __init__(self, counts: Tensor):
        """counts: (V,) rows of each word"""
        self.counts = counts.long()
        self.starts = torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)])
        self.total = int(self.starts[-1])
        self.most = int(self.counts.max())
        self.words = torch.repeat_interleave(self.counts)  # (rows,) the word of each row
        self.is_single = self.most == 1

    def __len__(self) -> int:
        return len(self.counts)

    def to(self, device: torch.device | str) -> "RowLayout":
        return RowLayout(self.counts.to(device))

    def columns(self, words: Tensor) -> tuple[Tensor, Tensor | None]:
        """The rows of each word side by side: words (...) -> (..., most); and where one is missing, if any can be.

        A missing row repeats the word's first one.
        """
        first = self.starts[words][..., None]
        if self.is_single:
            return first, None
        places = torch.arange(self.most, device=words.device)
        missing = places >= self.counts[words][..., None]
        return first + places.masked_fill(missing, 0), missing
