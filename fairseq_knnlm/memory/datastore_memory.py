"""A datastore as a memory: p_kNN, from k neighbours or from every visited entry."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..datastore import Datastore
from ..keys import KeyExtractor
from ..search import Search
from .base import KeptLogProbs, KeptNeighbors, Memory, MemoryFacts, MemoryScores
from .probabilities import entropy, neighbor_log_weights, similarities, target_log_probs, vocabulary_log_probs

QUERIES_PER_PART = 1 << 12  # times k neighbours, whose probabilities are in memory at once


class DatastoreMemory(Memory):
    """One datastore as a distribution over the next token."""

    def __init__(
        self,
        datastore: Datastore,
        engine: Search,
        k: int | None,
        weight: float,
        temperature: float,
        metric: str,
        extractor: KeyExtractor | None = None,
        identity: dict[str, Any] | None = None,
    ):
        """
        Args:
            k: neighbours per query; None: every visited entry
            weight: lambda
            identity: what decides which neighbours are found, for a saved run
        """
        self.datastore, self.engine, self.k, self.weight = datastore, engine, k, weight
        self.temperature, self.metric, self.extractor = temperature, metric, extractor
        self.identity = identity or {}
        self.preferred_queries = engine.preferred_queries
        self.name = datastore.folder.name

    @property
    def title(self) -> str:
        return f"in {self.name}"

    @property
    def temperatures(self) -> list[float]:
        """Those that a saved run keeps where every visited entry takes part, its own first.

        Doubles and halves, and others half-way between those: what TargetMass computes two at the price of one.
        """
        own, between = self.temperature, float(f"{self.temperature * 2**0.5:.4g}")
        others = [own * double for double in (0.25, 0.5, 2, 4)] + [between * double for double in (0.25, 0.5, 1, 2)]
        return [own, *sorted(others)]

    @property
    def facts(self) -> MemoryFacts:
        k = None if self.k is None else min(self.k, len(self.datastore))
        temperatures = self.temperatures if self.k is None else None
        return MemoryFacts("knn", k, self.weight, 1 / self.temperature, self.identity, temperatures)

    def project(self, queries: Tensor) -> np.ndarray:
        """The model's states (n, C) as the datastore's keys are: (n, dim) float32."""
        return np.ascontiguousarray(self.datastore.codec.project(queries.float().cpu().numpy()))

    def scores_in_parts(self, queries: Tensor, targets: Tensor, keep: bool = False) -> Iterator[MemoryScores]:
        vectors, wanted = self.project(queries), targets.cpu().numpy()
        if self.k is None:
            yield self._scores_of_all_visited(vectors, wanted, keep, targets.device)
            return
        first = 0
        for distances, ids in self.engine.search_in_parts(vectors, self.k):
            for start in range(0, len(ids), QUERIES_PER_PART):
                rows = slice(start, start + QUERIES_PER_PART)
                own = wanted[first : first + len(ids[rows])]
                yield self._scores_of_neighbors(distances[rows], ids[rows], own, keep, targets.device)
                first += len(own)

    def _scores_of_all_visited(
        self, queries: np.ndarray, targets: np.ndarray, keep: bool, device: torch.device
    ) -> MemoryScores:
        temperatures = self.temperatures if keep else [self.temperature]
        target_mass, total_mass = self.engine.target_mass(queries, targets, temperatures)
        with np.errstate(invalid="ignore"):  # -inf - -inf: nothing was visited
            log_probs = np.nan_to_num(target_mass - total_mass, nan=-np.inf, neginf=-np.inf)
        log_probs = torch.from_numpy(log_probs).float()
        return MemoryScores(log_probs[0].to(device), kept=KeptLogProbs(log_probs.T) if keep else None)

    def _scores_of_neighbors(
        self, distances: np.ndarray, ids: np.ndarray, targets: np.ndarray, keep: bool, device: torch.device
    ) -> MemoryScores:
        """distances (n, k), ids (n, k), targets (n,)."""
        matches = torch.from_numpy((self.datastore.values_of(ids) == targets[:, None]) & (ids >= 0))
        near = similarities(torch.from_numpy(distances), torch.from_numpy(ids), self.metric)
        weights = neighbor_log_weights(near, 1 / self.temperature)
        kept = KeptNeighbors(near, matches) if keep else None
        return MemoryScores(target_log_probs(weights, matches).to(device), entropy(weights), kept)

    def vocabulary_log_probs(self, queries: Tensor, vocabulary_size: int) -> Tensor:
        vectors = self.project(queries)
        if self.k is None:
            return torch.cat([self._vocabulary_of_all_visited(vector[None], vocabulary_size) for vector in vectors])
        return self._vocabulary(*self.engine.search(vectors, self.k), vocabulary_size)

    def _vocabulary_of_all_visited(self, query: np.ndarray, vocabulary_size: int) -> Tensor:
        """query (1, dim) -> (1, vocabulary)."""
        values, masses = self.engine.visited_masses(query, self.temperature)
        shares = neighbor_log_weights(torch.from_numpy(masses)[None], 1.0)
        return vocabulary_log_probs(shares, torch.from_numpy(values.astype(np.int64))[None], vocabulary_size)

    def _vocabulary(self, distances: np.ndarray, ids: np.ndarray, vocabulary_size: int) -> Tensor:
        values = torch.from_numpy(self.datastore.values_of(ids).astype(np.int64))
        near = similarities(torch.from_numpy(distances), torch.from_numpy(ids), self.metric)
        return vocabulary_log_probs(neighbor_log_weights(near, 1 / self.temperature), values, vocabulary_size)
