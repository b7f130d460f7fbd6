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
        self.targets = np.asarray(targets, np.int64)
        self._ascending = sorted(enumerate(factors), key=lambda numbered: numbered[1])
        self._alone = factors == [1]  # then the similarities need not be kept for another factor
        self._log_total = torch.full((len(factors), len(targets)), -torch.inf, dtype=torch.double)
        self._log_target = self._log_total.clone()
        self._lock = Lock()

    def add(self, rows: Tensor, similarities: Tensor, constants: Tensor, values: np.ndarray) -> None:
        """The queries ``rows`` (r,) see a block of entries with these values (m,), in ascending order. Thread-safe.

        The similarities are the sum of (r, m) and (r,), as block_distances returns them; the former are overwritten.
        """
        largest = similarities.amax(dim=1, keepdim=True)
        similarities -= largest  # now exp cannot overflow, and the nearest entry counts 1
        constants = constants.double() + largest[:, 0].double()
        runs = _Runs(values, self.targets[rows.numpy()])
        shares: dict[float, Tensor] = {}
        for number, factor in self._ascending:
            # exp(2 s) is exp(s) squared, several times as fast as another exp
            half = shares.pop(factor / 2, None)
            if half is not None:
                share = half.square_()
            elif self._alone:
                share = similarities.exp_()
            else:
                share = (similarities * factor).exp_()
            shares[factor] = share
            # In double precision: thousands of blocks are added up, at magnitudes where floats have few digits left.
            total, target = share.sum(dim=1).double(), torch.from_numpy(runs.sums(share.numpy())).double()
            log_constant = constants * factor
            with self._lock:
                for sums, new in ((self._log_total, total), (self._log_target, target)):
                    sums[number, rows] = torch.logaddexp(sums[number, rows], new.log() + log_constant)

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """log target mass (factors, n), log total mass (factors, n)."""
        return self._log_target.numpy(), self._log_total.numpy()


class _Runs:
    """Where each row of a block has its target: entries are in the order of their values, so it is one run of them.

    Example: 4 entries with the values 3, 5, 5, 8, and 3 queries with the targets 5, 7, 8. In the block of 3 x 4
    numbers, flattened, the run of query 0 is 1 to 3, query 1 has none, and the run of query 2 is 11 to 12:

        . x x .        edges 1, 3, 11 (12 is the end of the block)
        . . . .        sums between edges: of 1 to 3, of 3 to 11, of 11 to the end; every other one is a run
        . . . x
    """

    def __init__(self, values: np.ndarray, targets: np.ndarray):
        """values (m,) ascending, targets (r,)."""
        first, last = np.searchsorted(values, targets), np.searchsorted(values, targets, side="right")
        self._found = first < last
        row_starts = np.arange(len(targets)) * len(values)
        self._edges = np.stack([row_starts + first, row_starts + last], axis=1)[self._found].ravel()
        block_end = len(targets) * len(values)
        if len(self._edges) and self._edges[-1] == block_end:
            self._edges = self._edges[:-1]  # reduceat takes no edge there, and sums up to the end by itself

    def sums(self, block: np.ndarray) -> np.ndarray:
        """The sum of each row's run: (r, m) -> (r,)."""
        sums = np.zeros(len(self._found), np.float32)
        if len(self._edges):
            # from edge to edge: a run, what lies between two runs, a run, ...
            sums[self._found] = np.add.reduceat(block.ravel(), self._edges)[::2]
        return sums
