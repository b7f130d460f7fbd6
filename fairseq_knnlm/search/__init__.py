"""Searching: one protocol, several engines.

An engine answers ``search(queries, k) -> (distances, ids)`` in FAISS's conventions: squared L2 distances or inner
products, best first, id -1 where there are fewer than k. Engines that can visit whole clusters also answer
``target_mass``, which needs no selection.
"""

from typing import Protocol

import numpy as np

from .exact import ExactSearch
from .ivf import ClusterSearch
from .local import FaissSearch, Rescored

__all__ = ["ClusterSearch", "ExactSearch", "FaissSearch", "MassSearch", "Rescored", "Search"]


class Search(Protocol):
    preferred_queries: int  # how many queries at once it likes best

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """queries (n, dim) float32 -> distances (n, k) float32, ids (n, k) int64."""


class MassSearch(Protocol):
    preferred_queries: int

    def visited(self, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """query (1, dim) -> distances (1, m) and ids (1, m) of every visited entry, in any order."""

    def target_mass(
        self, queries: np.ndarray, targets: np.ndarray, temperatures: list[float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log of the softmax's numerator and denominator over every visited entry, at each temperature.

        queries (n, dim), targets (n,) -> log sum of exp(similarity / T) over the entries whose value is the target
        (temperatures, n), and over all entries (temperatures, n).
        """
