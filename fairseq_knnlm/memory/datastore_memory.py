"""A datastore as a memory: p_kNN, from k neighbours or from every visited entry."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..datastore import Datastore
from ..keys import KeyExtractor
from ..search import Search
from ..search.masses import Masses
from .base import KeptLogProbs, KeptNeighbors, Memory, MemoryFacts, MemoryScores, VocabularyScores
from .features import NEAREST, PROFILE, Features, mass_name, neighbor_features, relative_mass
from .probabilities import (
    entropy,
    log_probs_of_masses,
    neighbor_log_weights,
    similarities,
    target_log_probs,
    vocabulary_log_probs,
)

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
        self.preferred_queries, self.part_queries = engine.preferred_queries, engine.part_queries
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
        folder = str(self.datastore.folder.resolve())
        features, lists = [], None
        if temperatures:
            masses = [mass_name(1 / temperature) for temperature in temperatures]
            features, lists = [NEAREST, *masses, *self.engine.early_names], self.engine.early_lists
        return MemoryFacts(
            "knn", k, self.weight, 1 / self.temperature, self.identity, temperatures, folder, features, lists,
            weighted=self.k is not None and self.datastore.is_weighted,
        )  # fmt: skip

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
        temperatures, features, kept = self.temperatures if keep else self._profile_temperatures(), None, None
        found = self.engine.masses(queries, targets, temperatures, keep or self.with_features, keep)
        log_probs = _log_ratio(found.target, found.total)
        if keep or self.with_features:
            features = self._features(found, temperatures)
        if keep:
            kept = KeptLogProbs(log_probs.T)
            if found.expected is not None and found.ranked is not None:
                kept.expected = torch.from_numpy(found.expected)
                kept.ranked = _log_ratio(*np.logaddexp.accumulate(found.ranked, axis=1)).T
        return MemoryScores(log_probs[0].to(device), kept=kept, features=features)

    def _profile_temperatures(self) -> list[float]:
        """Its own first, and those that a gate looks at besides."""
        return [self.temperature / factor for factor in (PROFILE if self.with_features else PROFILE[:1])]

    def _features(self, found: Masses, temperatures: list[float]) -> Features:
        """What a gate may look at, of everything that was visited."""
        assert found.largest is not None
        nearest = torch.from_numpy(found.largest)
        features = {NEAREST: (nearest * temperatures[0]).float()}
        for temperature, log_mass in zip(temperatures, torch.from_numpy(found.total)):
            features[mass_name(1 / temperature)] = relative_mass(log_mass, nearest * (temperatures[0] / temperature))
        if found.early is not None:
            features |= dict(zip(self.engine.early_names, torch.from_numpy(found.early).float().unbind(dim=1)))
        return features

    def _scores_of_neighbors(
        self, distances: np.ndarray, ids: np.ndarray, targets: np.ndarray, keep: bool, device: torch.device
    ) -> MemoryScores:
        """distances (n, k), ids (n, k), targets (n,)."""
        matches = torch.from_numpy((self.datastore.values_of(ids) == targets[:, None]) & (ids >= 0))
        near = similarities(torch.from_numpy(distances), torch.from_numpy(ids), self.metric)
        own = self._log_weights_of(ids)
        weights = neighbor_log_weights(near, 1 / self.temperature, own)
        kept = KeptNeighbors(near, matches, own) if keep else None
        log_probs = target_log_probs(weights, matches).to(device)
        return MemoryScores(log_probs, entropy(weights), kept, self._neighbor_features(near, own))

    def _log_weights_of(self, ids: np.ndarray) -> Tensor | None:
        """Log of the weights of some entries, in ids' shape; None: each counts 1."""
        log_weights = self.datastore.log_weights_of(ids)
        return None if log_weights is None else torch.from_numpy(log_weights)

    def _neighbor_features(self, near: Tensor, log_weights: Tensor | None) -> Features | None:
        if not self.with_features:
            return None
        return neighbor_features(near, [factor / self.temperature for factor in PROFILE], log_weights)

    def vocabulary_log_probs(self, queries: Tensor, vocabulary_size: int) -> Tensor:
        return self.vocabulary_scores(queries, vocabulary_size).log_probs

    def vocabulary_scores(self, queries: Tensor, vocabulary_size: int) -> VocabularyScores:
        vectors = self.project(queries)
        if self.k is not None:
            return self._vocabulary(*self.engine.search(vectors, self.k), vocabulary_size)
        parts = [self._vocabulary_of_all_visited(vector[None], vocabulary_size) for vector in vectors]
        features = None
        if self.with_features:  # the same sums that scoring looks at, whatever the far field adds to them
            temperatures, targets = self._profile_temperatures(), np.zeros(len(vectors), np.int64)
            features = self._features(self.engine.masses(vectors, targets, temperatures, early=True), temperatures)
        return VocabularyScores(parts[0] if len(parts) == 1 else torch.cat(parts), features)

    def _vocabulary_of_all_visited(self, query: np.ndarray, vocabulary_size: int) -> Tensor:
        """query (1, dim) -> (1, vocabulary)."""
        values, masses = self.engine.visited_masses(query, self.temperature)
        return torch.from_numpy(log_probs_of_masses(values, masses, vocabulary_size))[None]

    def _vocabulary(self, distances: np.ndarray, ids: np.ndarray, vocabulary_size: int) -> VocabularyScores:
        values = torch.from_numpy(self.datastore.values_of(ids).astype(np.int64))
        near = similarities(torch.from_numpy(distances), torch.from_numpy(ids), self.metric)
        own = self._log_weights_of(ids)
        weights = neighbor_log_weights(near, 1 / self.temperature, own)
        log_probs = vocabulary_log_probs(weights, values, vocabulary_size)
        return VocabularyScores(log_probs, self._neighbor_features(near, own))


def _log_ratio(target: np.ndarray, total: np.ndarray) -> Tensor:
    """Log of the target's share of the mass, float32; -inf where there is none."""
    with np.errstate(invalid="ignore"):  # -inf - -inf: nothing was visited
        return torch.from_numpy(np.nan_to_num(target - total, nan=-np.inf, neginf=-np.inf)).float()
