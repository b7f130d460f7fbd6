"""Two sums per query instead of a sorted list: the mass of all entries, and of those whose value is the target."""

from threading import Lock

import numpy as np
import torch
from torch import Tensor


class TargetMass:
    """Accumulates log sum exp(similarity) block by block, in total and over the entries whose value is the target."""

    def __init__(self, targets: np.ndarray):
        """targets (n,)."""
        self.targets = torch.from_numpy(np.asarray(targets, np.int64))
        # In double precision: thousands of blocks are added up, at magnitudes where floats have few digits left.
        self._log_total = torch.full((len(targets),), -torch.inf, dtype=torch.double)
        self._log_target = self._log_total.clone()
        self._lock = Lock()

    def add(self, rows: Tensor, similarities: Tensor, constants: Tensor, values: np.ndarray) -> None:
        """The queries ``rows`` (r,) see a block of entries with these values (m,). Thread-safe.

        The similarities are the sum of (r, m) and (r,), as block_distances returns them.
        """
        shares = torch.softmax(similarities, dim=1)
        largest, where = shares.max(dim=1)
        # share = exp(similarity - log total), so any entry tells the total; the largest one does it best
        log_total = similarities.gather(1, where[:, None])[:, 0].double() - largest.double().log() + constants
        target_share = _sum_matching(shares, torch.from_numpy(values.astype(np.int64)), self.targets[rows])
        log_target = target_share.double().log() + log_total
        with self._lock:
            self._log_total[rows] = torch.logaddexp(self._log_total[rows], log_total)
            self._log_target[rows] = torch.logaddexp(self._log_target[rows], log_target)

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """log target mass (n,), log total mass (n,)."""
        return self._log_target.numpy(), self._log_total.numpy()


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
