"""The far field: lists that are not visited take part, too, each as one Gaussian.

The keys of a list are taken as normally distributed around its centroid c, with a variance v in every dimension, which
is the spread of this list. Then the expected mass of a list of n entries at temperature T is, for squared L2 distances,

    n (1 + 2 v / T)^(-dim / 2) exp(-|q - c|^2 / (T + 2 v))

and for inner products n exp(q.c / T + |q|^2 v / 2 T^2). The target's part of it is its share of the list's entries. The
L2 distances to the centroids are known from choosing the lists to visit, so the far field costs next to nothing.

Real lists have heavier tails than a Gaussian, so the estimate is too small, for all lists of a query by about the same
factor. The visited lists tell that factor: there both the mass and its estimate are known. So nothing has to be tuned.
"""

import numpy as np
import torch
from torch import Tensor

from ..index.list_files import SortedLists
from ..parallel import for_each
from .visits import stable_order

PLACES_AT_ONCE = 1 << 18
QUERIES_AT_ONCE = 1 << 11  # whose estimates are in memory at once in a thread


class FarField:
    """Estimates of the mass of lists, from what stands beside an index."""

    def __init__(self, lists: SortedLists, metric: str):
        self._lists, self._metric, self._dim = lists, metric, lists.info.dim
        self._sizes = np.diff(lists.file.starts)
        with np.errstate(divide="ignore"):
            self._log_sizes = torch.from_numpy(np.log(self._sizes)).float()  # -inf: an empty list has no mass
        self._variances = torch.from_numpy(lists.spreads) / self._dim
        self._means = torch.from_numpy(lists.means) if metric == "ip" else torch.empty(0)
        # A run is found by list and value in one: runs stand in the order of lists, and in a list of values.
        numbers = np.repeat(np.arange(len(self._sizes)), np.diff(lists.run_starts))
        self._vocabulary = int(lists.run_values.max()) + 1
        self._run_keys = numbers * self._vocabulary + lists.run_values
        first_of_list = np.diff(numbers, prepend=-1) != 0
        self._run_counts = np.where(first_of_list, lists.run_ends, np.diff(lists.run_ends, prepend=0)).astype(np.int32)

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
        shares = self.log_shares(lists[:, nprobe:], targets)
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
        values, masses = [np.empty(0, np.int64)], [np.empty(0)]
        for number, mass in zip(lists[0, nprobe:].tolist(), far.tolist()):
            if number >= 0 and self._sizes[number]:
                runs = slice(*self._lists.run_starts[number : number + 2].tolist())
                values.append(self._lists.run_values[runs])
                masses.append(mass + np.log(self._run_counts[runs] / self._sizes[number]))
        return np.concatenate(values), np.concatenate(masses)

    def log_mass(self, queries: Tensor, lists: np.ndarray, distances: np.ndarray, temperature: float) -> Tensor:
        """The estimated log mass of lists (n, m), -1 for none, whose centroids are so far away (n, m) -> (n, m)."""
        numbers, near = torch.from_numpy(np.maximum(lists, 0)), torch.from_numpy(distances)
        variances = self._variances[numbers]
        log_mass = self._log_sizes[numbers].masked_fill(torch.from_numpy(lists < 0), -torch.inf)
        if self._metric == "ip":  # whose centroids have unit length, wherever the keys are: so with the means
            products = torch.bmm(self._means[numbers], queries[:, :, None])[:, :, 0]
            squares = queries.square().sum(dim=1, keepdim=True)
            return log_mass + products / temperature + squares * variances / (2 * temperature * temperature)
        widths = temperature + 2 * variances
        return log_mass - 0.5 * self._dim * (widths / temperature).log() - near / widths

    def log_shares(self, lists: np.ndarray, targets: np.ndarray) -> Tensor:
        """Log of the share of each list's entries whose value is the target: (n, m), (n,) -> (n, m), -inf for none."""
        shares = np.zeros(lists.size, np.float32)
        flat, width = lists.reshape(-1), lists.shape[1]

        def find(places: np.ndarray) -> None:
            tokens = targets[places // width]
            wanted = flat[places].astype(np.int64) * self._vocabulary + tokens
            wanted[tokens >= self._vocabulary] = -1  # which no entry has
            runs = np.minimum(np.searchsorted(self._run_keys, wanted), len(self._run_keys) - 1)
            found = self._run_keys[runs] == wanted
            shares[places[found]] = self._run_counts[runs[found]] / self._sizes[flat[places[found]]]

        # In the order of the lists, so that look-ups stay in one part of the runs for a while.
        order = stable_order(np.where(flat < 0, len(self._sizes), flat))
        for_each(find, [(order[start : start + PLACES_AT_ONCE],) for start in range(0, len(order), PLACES_AT_ONCE)])
        return torch.from_numpy(shares.reshape(lists.shape)).log_()


def _finite_mean(rows: Tensor) -> Tensor:
    """The mean of the finite numbers of each row, (n, m) -> (n,)."""
    finite = rows.isfinite()
    return rows.masked_fill(~finite, 0).sum(dim=1) / finite.sum(dim=1).clamp(min=1)
