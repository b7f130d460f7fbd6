"""What a search engine answers, in FAISS's conventions: squared L2 distances or inner products, best first, id -1 where
there are fewer than k.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from ..errors import KnnlmError
from .distances import similarity_scale
from .masses import Masses

QUERIES_PER_PART = 1 << 15


class Search(ABC):
    """The one base of all engines. Those that visit whole lists also answer for every visited entry."""

    preferred_queries: int  # how many queries at once it likes best
    part_queries: int = 0  # so many are searched elsewhere while the model works on the next ones; 0: all of them here
    metric: str  # l2 or ip
    early_names: tuple[str, ...] = ()  # what ``masses`` tells that is known before any list is read
    early_lists: int | None = None  # of how many lists of a query it tells the share of the mass that it expects there

    @abstractmethod
    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """queries (n, dim) float32 -> distances (n, k) float32, ids (n, k) int64."""

    def search_in_parts(self, queries: np.ndarray, k: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """As ``search``, some consecutive rows at a time: k neighbours of all queries are more than memory may hold.

        The neighbours come in the order of the engine's own ranking, so that the first k' of them are what a search
        for k' finds. That is best first, except where the distances are not the ones that were ranked by.
        """
        for start in range(0, len(queries), QUERIES_PER_PART):
            yield self.search(queries[start : start + QUERIES_PER_PART], k)

    def visited(self, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """query (1, dim) -> distances (1, m) and ids (1, m) of every visited entry, in any order."""
        raise self._without_lists()

    def visited_masses(self, query: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        """query (1, dim) -> values (m,) and the log of their masses (m,), of every visited entry; values may repeat."""
        distances, ids = self.visited(query)
        masses, log_weights = distances[0] * similarity_scale(self.metric, temperature), self.log_weights_of(ids[0])
        return self.values_of(ids[0]), masses if log_weights is None else masses + log_weights

    def values_of(self, ids: np.ndarray) -> np.ndarray:
        """The values of the entries with these ids (m,)."""
        raise self._without_lists()

    def log_weights_of(self, ids: np.ndarray) -> np.ndarray | None:
        """Log of the weights of the entries with these ids (m,); None: each counts 1."""
        raise self._without_lists()

    def masses(
        self,
        queries: np.ndarray,
        targets: np.ndarray,
        temperatures: list[float],
        early: bool = False,
        keep: bool = False,
    ) -> Masses:
        """Log of the softmax's numerator and denominator over every visited entry, at each temperature.

        Where entries have weights, each term of the sums is multiplied by that of its entry.

        queries (n, dim), targets (n,) -> log sum of exp(similarity / T) over the entries whose value is the target
        (temperatures, n), and over all entries (temperatures, n); the largest similarity, divided by the first
        temperature (n,).

        Args:
            early: also tell ``early_names``
            keep: also tell the sums by rank of a list, at the first temperature, where there are lists
        """
        raise self._without_lists()

    def target_mass(
        self, queries: np.ndarray, targets: np.ndarray, temperatures: list[float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The two sums of ``masses`` alone."""
        found = self.masses(queries, targets, temperatures)
        return found.target, found.total

    def _without_lists(self) -> KnnlmError:
        return KnnlmError(f"{type(self).__name__} visits no whole lists; search for a number of neighbours instead")
