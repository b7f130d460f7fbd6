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
        self._ascending = sorted(enumerate(factors), key=lambda numbered: numbered[1])
        self._log_total = torch.full((len(factors), len(targets)), -torch.inf, dtype=torch.double)
        self._log_target = self._log_total.clone()
        self._lock = Lock()

    def add(self, rows: Tensor, similarities: Tensor, constants: Tensor, values: np.ndarray) -> None:
        """The queries ``rows`` (r,) see a block of entries with these values (m,). Thread-safe.

        The similarities are the sum of (r, m) and (r,), as block_distances returns them; the former are overwritten.
        """
        row, column = _matching(torch.from_numpy(values.astype(np.int64)), self.targets[rows])
        largest = similarities.amax(dim=1, keepdim=True)
        similarities -= largest  # now exp cannot overflow, and the nearest entry counts 1
        constants = constants.double() + largest[:, 0].double()
        shares: dict[float, Tensor] = {}
        for number, factor in self._ascending:
            # exp(2 s) is exp(s) squared, several times as fast as another exp
            half = shares.pop(factor / 2, None)
            if half is not None:
                share = half.square_()
            else:
                share = similarities.exp() if factor == 1 else (similarities * factor).exp_()
            shares[factor] = share
            # In double precision: thousands of blocks are added up, at magnitudes where floats have few digits left.
            total = share.sum(dim=1).double()
            target = torch.zeros(len(rows)).index_add_(0, row, share[row, column]).double()
            log_constant = constants * factor
            with self._lock:
                for sums, new in ((self._log_total, total), (self._log_target, target)):
                    sums[number, rows] = torch.logaddexp(sums[number, rows], new.log() + log_constant)

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
