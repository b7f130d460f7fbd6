"""What an engine answers. In FAISS's conventions: squared L2 distances or inner products, best first, id -1 where there
are fewer than k.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

ROWS_AT_ONCE = 1 << 15


class Search(Protocol):
    preferred_queries: int  # how many queries at once it likes best

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """queries (n, dim) float32 -> distances (n, k) float32, ids (n, k) int64."""

    def search_in_parts(self, queries: np.ndarray, k: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """As ``search``, some consecutive rows at a time: k neighbours of all queries are more than memory may hold."""
        for start in range(0, len(queries), ROWS_AT_ONCE):
            yield self.search(queries[start : start + ROWS_AT_ONCE], k)


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
