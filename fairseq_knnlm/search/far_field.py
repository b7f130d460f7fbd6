"""The far field: lists that are not visited take part, too, each as one Gaussian.

The expected mass of a list is that of ``early.py``; the target's part of it is its share of the list's entries, or of
their weights. So the far field costs next to nothing.

Real lists have heavier tails than a Gaussian, so the estimate is too small, for all lists of a query by about the same
factor. The visited lists tell that factor: there both the mass and its estimate are known. So nothing has to be tuned.
"""

import numpy as np
import torch
from torch import Tensor

from ..index.list_files import SortedLists
from ..parallel import for_each
from .early import ListEstimates
from .target_shares import log_target_shares

QUERIES_AT_ONCE = 1 << 11  # whose estimates are in memory at once in a thread


class FarField:
    """Estimates of the mass of lists and of the target in them, from what stands beside an index."""

    def __init__(self, lists: SortedLists, estimates: ListEstimates):
        self._lists, self._counts, self.log_mass = lists, estimates.counts, estimates.log_mass

    def masses(
        self,
        queries: np.ndarray,
        targets: np.ndarray,
        lists: np.ndarray,
        distances: np.ndarray,
        nprobe: int,
        temperatures: list[float],
        visited: Tensor,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log mass of the target and in total, of the lists that are not visited: (temperatures, n) each.

        Args:
            queries: (n, dim)
            targets: (n,)
            lists: (n, m) the nearest lists, -1 for none, of which the first ``nprobe`` are visited
            distances: (n, m) to their centroids
            visited: (temperatures, n) the mean log mass of the lists that a query has visited
        """
        shares = log_target_shares(self._lists, self._counts, lists[:, nprobe:], targets)
        target, total = np.empty((2, len(temperatures), len(queries)))
        vectors = torch.from_numpy(np.ascontiguousarray(queries, np.float32))

        def estimate(rows: slice) -> None:
            for number, temperature in enumerate(temperatures):
                log_mass = self.log_mass(vectors[rows], lists[rows], distances[rows], temperature)
                offset = visited[number, rows].float() - _finite_mean(log_mass[:, :nprobe])
                far = log_mass[:, nprobe:] + offset[:, None]
                total[number, rows] = far.logsumexp(dim=1).numpy()
                target[number, rows] = (far + shares[rows]).logsumexp(dim=1).numpy()

        for_each(estimate, [(slice(r, r + QUERIES_AT_ONCE),) for r in range(0, len(queries), QUERIES_AT_ONCE)])
        return target, total

    def vocabulary(
        self,
        query: np.ndarray,
        lists: np.ndarray,
        distances: np.ndarray,
        nprobe: int,
        temperature: float,
        visited: Tensor,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of one query (1, dim): values (m,) in the lists that are not visited, and the log of their masses (m,)."""
        vector = torch.from_numpy(np.ascontiguousarray(query, np.float32))
        log_mass = self.log_mass(vector, lists, distances, temperature)
        far = (log_mass[0, nprobe:] + visited[0, 0] - _finite_mean(log_mass[:, :nprobe])).double().numpy()
        there = lists[0, nprobe:]
        known = (there >= 0) & (self._counts[there] > 0)
        there, far = there[known], far[known]
        values, counts, runs = self._lists.runs_of(there)
        return values, np.log(counts) + np.repeat(far - np.log(self._counts[there]), runs)


def _finite_mean(rows: Tensor) -> Tensor:
    """The mean of the finite numbers of each row, (n, m) -> (n,)."""
    finite = rows.isfinite()
    return rows.masked_fill(~finite, 0).sum(dim=1) / finite.sum(dim=1).clamp(min=1)
