"""Two sums per query instead of a sorted list: the mass of all entries, and of those whose value is the target."""

from threading import Lock

import numpy as np
import torch
from torch import Tensor


class TargetMass:
    """Accumulates log sum exp(similarity) block by block, in total and over the entries whose value is the target.

    At several sharpnesses at once, where asked to: the similarities times each of ``factors``.
    """

    def __init__(self, targets: np.ndarray, factors: list[float]):
        """targets (n,)."""
        self.targets = torch.from_numpy(np.asarray(targets, np.int64))
        self.factors = factors
        # In double precision: thousands of blocks are added up, at magnitudes where floats have few digits left.
        self._log_total = torch.full((len(factors), len(targets)), -torch.inf, dtype=torch.double)
        self._log_target = self._log_total.clone()
        self._lock = Lock()

    def add(self, rows: Tensor, similarities: Tensor, constants: Tensor, values: np.ndarray) -> None:
        """The queries ``rows`` (r,) see a block of entries with these values (m,). Thread-safe.

        The similarities are the sum of (r, m) and (r,), as block_distances returns them.
        """
        row, column = _matching(torch.from_numpy(values.astype(np.int64)), self.targets[rows])
        for number, factor in enumerate(self.factors):
            scaled = similarities if factor == 1 else similarities * factor
            shares = torch.softmax(scaled, dim=1)
            largest, where = shares.max(dim=1)
            # share = exp(similarity - log total), so any entry tells the total; the largest one does it best
            log_total = scaled.gather(1, where[:, None])[:, 0].double() - largest.double().log() + constants * factor
            target_share = torch.zeros(len(rows)).index_add_(0, row, shares[row, column])
            log_target = target_share.double().log() + log_total
            with self._lock:
                self._log_total[number, rows] = torch.logaddexp(self._log_total[number, rows], log_total)
                self._log_target[number, rows] = torch.logaddexp(self._log_target[number, rows], log_target)

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """log target mass (factors, n), log total mass (factors, n)."""
        return self._log_target.numpy(), self._log_total.numpy()


def _matching(values: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Where a row's target is an entry's value: values (m,), targets (r,) -> rows and columns of the matches.

    A target matches a few values in a hundred, so finding them beats comparing everything.
    """
    values, order = values.sort()
    first = torch.searchsorted(values, targets)
    counts = torch.searchsorted(values, targets, right=True) - first
    rows = torch.repeat_interleave(torch.arange(len(targets)), counts)
    # position inside the run of equal values: a running number minus where the row's run begins
    offsets = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    return rows, order[first[rows] + offsets]
