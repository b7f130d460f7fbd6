"""Two sums per query instead of a sorted list: the mass of all entries, and of those whose value is the target."""

import numpy as np
import torch
from torch import Tensor

from ..probs import similarity


class TargetMass:
    """Accumulates, block of entries by block of entries, the sum of exp(similarity) in total and for the target."""

    def __init__(self, targets: np.ndarray, metric: str, temperature: float):
        """targets (n,)."""
        self.targets = torch.from_numpy(np.asarray(targets, np.int64))
        self.metric, self.temperature = metric, temperature
        count = len(targets)
        self._max = torch.full((count,), -torch.inf)  # largest similarity so far; both sums are relative to it
        self._total = torch.zeros(count)
        self._target = torch.zeros(count)

    def add(self, rows: Tensor, distances: Tensor, values: np.ndarray) -> None:
        """The queries ``rows`` (r,) see entries at these distances (r, m) with these values (m,)."""
        scores = similarity(distances, self.metric, self.temperature)
        old_max = self._max[rows]
        new_max = torch.maximum(old_max, scores.amax(dim=1))
        weights = scores.sub_(new_max[:, None]).exp_()
        rescale = (old_max - new_max).exp_()
        self._max[rows] = new_max
        self._total[rows] = self._total[rows] * rescale + weights.sum(dim=1)
        values = torch.from_numpy(values.astype(np.int64))
        self._target[rows] = self._target[rows] * rescale + _sum_matching(weights, values, self.targets[rows])

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
