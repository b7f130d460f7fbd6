"""What every memory answers: log p of targets, or of the whole vocabulary, for queries."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import KnnlmError
from ..keys import KeyExtractor
from .features import Features


@dataclass
class MemoryFacts:
    """One memory of a run: what it is and how it was used. A saved run keeps it."""

    name: str  # knn0, knn1, ..., head0, head1, ..., cache
    neighbors: int | None  # k, or the cache's size; None: every visited entry
    weight: float  # lambda
    sharpness: float  # 1 / temperature, or theta
    identity: dict[str, Any]  # what makes two memories the same: fingerprint, metric, index, ...
    temperatures: list[float] | None = None  # where every visited entry takes part: those that are kept
    folder: str | None = None  # of a datastore or a head
    features: list[str] = field(default_factory=list)  # what a save keeps for a gate, besides neighbours
    lists: int | None = None  # of how many lists a save keeps the share that was expected before they were read
    weighted: bool = False  # whether neighbours have weights, which a save keeps with them

    @property
    def is_cache(self) -> bool:
        return self.name == "cache"

    @property
    def is_head(self) -> bool:
        return self.name.startswith("head")

    @property
    def saved_neighbors(self) -> int:
        """How many neighbours of each token a saved run keeps, where it keeps them."""
        if self.neighbors is None:
            raise KnnlmError(f"with --knn-k all no neighbours of {self.name} are saved; score again with --knn-k 1024")
        return self.neighbors

    @property
    def saved_temperatures(self) -> list[float]:
        """The temperatures that a saved run keeps where it keeps no neighbours."""
        if self.temperatures is None:
            raise KnnlmError(f"no temperatures of {self.name} are saved, so the save is damaged; score again")
        return self.temperatures


@dataclass
class KeptNeighbors:
    """Neighbours of some tokens, from which every k and temperature can be computed later."""

    similarities: Tensor  # (n, k), -inf where there is no neighbour
    matches: Tensor  # (n, k) bool: whether the neighbour's value is the token
    log_weights: Tensor | None = None  # (n, k) log of the entries' weights; None: each counts 1


@dataclass
class KeptLogProbs:
    """Log p of some tokens at several temperatures: where every visited entry takes part, there is no list of them."""

    log_probs: Tensor  # (n, temperatures)
    expected: Tensor | None = None  # (n, lists) log of the share of a query's mass that each list was expected to hold
    ranked: Tensor | None = None  # (n, ranks) log p with the nearest 1, 2, 4, 8, ... lists, at the first temperature


@dataclass
class MemoryScores:
    """What a memory says of n consecutive tokens."""

    log_probs: Tensor  # (n,) float32, -inf where the memory does not hold the token
    entropy: Tensor | None = None  # (n,) of the neighbours' shares, in nats; None where no shares are computed
    kept: KeptNeighbors | KeptLogProbs | None = None  # for a saved run, if that was asked for
    features: Features | None = None  # for a gate or a saved run, if that was asked for


@dataclass
class VocabularyScores:
    """What a memory says of every token that may come next."""

    log_probs: Tensor  # (n, vocabulary), -inf where the memory does not hold it
    features: Features | None = None  # for a gate, if that was asked for


class Memory(ABC):
    """A datastore, a learned head, the continuous cache, or anything else that predicts the next token from a query."""

    weight: float  # lambda, its share of the mixture
    extractor: KeyExtractor | None  # takes its queries from the model's forward pass
    preferred_queries: int = 0  # how many queries at once it likes best; 0: any number
    with_features: bool = False  # whether its scores come with what a gate looks at
    part_queries: int = 0  # so many are searched elsewhere while the model works on the next ones; 0: all of them here

    @property
    @abstractmethod
    def title(self) -> str:
        """How a summary calls it: "in the cache"."""

    @property
    @abstractmethod
    def facts(self) -> MemoryFacts:
        """What a saved run keeps about it; the name is its place among the memories and is set there."""

    @abstractmethod
    def scores_in_parts(self, queries: Tensor, targets: Tensor, keep: bool = False) -> Iterator[MemoryScores]:
        """Scores of consecutive tokens, some at a time: what is kept of all of them is more than memory may hold.

        Args:
            queries: (n, dim)
            targets: (n,)
            keep: whether to return what a saved run needs
        """

    def target_log_probs(self, queries: Tensor, targets: Tensor) -> Tensor:
        """log p of the targets: queries (n, dim), targets (n,) -> (n,); -inf where the memory does not hold them."""
        parts = [part.log_probs for part in self.scores_in_parts(queries, targets)]
        return torch.cat(parts) if parts else torch.empty(0)

    @abstractmethod
    def vocabulary_log_probs(self, queries: Tensor, vocabulary_size: int) -> Tensor:
        """log p of every token: queries (n, dim) -> (n, vocabulary), -inf where the memory does not hold it."""

    def vocabulary_scores(self, queries: Tensor, vocabulary_size: int) -> VocabularyScores:
        """As ``vocabulary_log_probs``, with the same features that scores of targets come with."""
        return VocabularyScores(self.vocabulary_log_probs(queries, vocabulary_size), {} if self.with_features else None)


def name_memories(memories: list[Memory]) -> list[MemoryFacts]:
    """The facts of the memories of a run: datastores are knn0, knn1, ..., heads head0, ...; the cache is the cache."""
    facts, counts = [], {"knn": 0, "head": 0}
    for memory in memories:
        fact = memory.facts
        if not fact.is_cache:
            kind = "head" if fact.is_head else "knn"
            fact.name, counts[kind] = f"{kind}{counts[kind]}", counts[kind] + 1
        facts.append(fact)
    return facts
