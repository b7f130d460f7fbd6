"""Two sums per query instead of a sorted list: the mass of all entries, and of those whose value is the target."""

import numpy as np
import torch
from torch import Tensor

from ..probs import similarity


class TargetMass:
    """Accumulates, block of keys by block of keys, log sum exp(similarity) in total and for the target."""

    def __init__(self, queries: np.ndarray, targets: np.ndarray, metric: str, temperature: float):
        """queries (n, dim), targets (n,)."""
        self.queries = torch.from_numpy(np.ascontiguousarray(queries, np.float32))
        self.targets = torch.from_numpy(np.asarray(targets, np.int64))
        self.metric, self.temperature = metric, temperature
        count = len(queries)
        self._max = torch.full((count,), -torch.inf)  # largest similarity so far; both sums are relative to it
        self._total = torch.zeros(count)
        self._target = torch.zeros(count)

    def add(self, rows: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        """Let the queries ``rows`` (r,) see a block: keys (m, dim), values (m,)."""
        rows = torch.from_numpy(rows)
        keys = torch.from_numpy(np.array(keys, np.float32))
        scores = similarity(self._distances(self.queries[rows], keys), self.metric, self.temperature)  # (r, m)
        new_max = torch.maximum(self._max[rows], scores.amax(dim=1))
        weights = scores.sub_(new_max[:, None]).exp_()
        rescale = (self._max[rows] - new_max).exp()
        self._max[rows] = new_max
        self._total[rows] = self._total[rows] * rescale + weights.sum(dim=1)
        values = torch.from_numpy(values.astype(np.int64))
        self._target[rows] = self._target[rows] * rescale + _sum_matching(weights, values, self.targets[rows])

    def _distances(self, queries: Tensor, keys: Tensor) -> Tensor:
        if self.metric == "ip":
            return queries @ keys.T
        # |q - k|^2 = |q|^2 + |k|^2 - 2 q.k cancels badly when the norms are large, so move the origin to the keys.
        origin = keys.mean(dim=0)
        queries, keys = queries - origin, keys - origin
        distances = torch.addmm((keys * keys).sum(dim=1), queries, keys.T, alpha=-2.0)
        return distances.add_((queries * queries).sum(dim=1, keepdim=True)).clamp_(min=0.0)

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """log target mass (n,), log total mass (n,), relative to the same reference."""
        return self._target.log().numpy(), self._total.log().numpy()


def _sum_matching(weights: Tensor, values: Tensor, targets: Tensor) -> Tensor:
    """For each row the sum of the weights whose value is the row's target: (r, m), (m,), (r,) -> (r,).

    A target matches a few values in a hundred, so finding them beats comparing everything.
    """
    values, order = values.sort()
    first = torch.searchsorted(values, targets)
    counts = torch.searchsorted(values, targets, right=True) - first
    rows = torch.repeat_interleave(torch.arange(len(targets)), counts)
    # position inside the run of equal values: a running number minus where the row's run begins
    offsets = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    matching = weights[rows, order[first[rows] + offsets]]
    return torch.zeros(len(targets)).index_add_(0, rows, matching)
