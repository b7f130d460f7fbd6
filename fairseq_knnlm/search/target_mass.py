"""Two sums per query instead of a sorted list: the mass of all entries, and of those whose value is the target.

Integers (which entries are a query's target) are found on the CPU; floats stay on the device where the search runs.
"""

from threading import Lock

import numpy as np
import torch
from torch import Tensor


class TargetRuns:
    """Where each row of a block has its target: entries are in the order of their values, so it is one run of them.

    Example: 4 entries with the values 3, 5, 5, 8, and 3 queries with the targets 5, 7, 8. In the block of 3 x 4
    numbers, flattened, the run of query 0 is 1 to 3, query 1 has none, and the run of query 2 is 11 to 12:

        . x x .        begins 1, 11
        . . . .        ends   3, 12
        . . . x        rows   0, 2
    """

    def __init__(self, run_values: np.ndarray, run_ends: np.ndarray, targets: np.ndarray):
        """
        Args:
            run_values: (runs,) ascending
            run_ends: (runs,) where each run ends; the last one is the number of entries
            targets: (r,)
        """
        runs = np.minimum(np.searchsorted(run_values, targets), len(run_values) - 1)
        self.rows = np.flatnonzero(run_values[runs] == targets)
        runs, row_starts = runs[self.rows], self.rows * int(run_ends[-1])
        self.begins = row_starts + np.where(runs > 0, run_ends[runs - 1], 0)
        self.ends = row_starts + run_ends[runs]

    def sums(self, block: Tensor) -> Tensor:
        """The sum of each row's run: (r, m) -> (r,) double."""
        sums = torch.zeros(len(block), dtype=torch.double, device=block.device)
        if len(self.rows) == 0:
            return sums
        if block.device.type != "cpu":
            return self._gathered_sums(block, sums)
        # from edge to edge: a run, what lies between two runs, a run, ...; for NumPy one pass over the block
        edges = np.stack([self.begins, self.ends], axis=1).ravel()
        if edges[-1] == block.numel():
            edges = edges[:-1]  # reduceat takes no edge there, and sums up to the end by itself
        sums.numpy()[self.rows] = np.add.reduceat(block.numpy().ravel(), edges)[::2]
        return sums

    def _gathered_sums(self, block: Tensor, sums: Tensor) -> Tensor:
        """The same on any device: gather the entries of all runs, and add them up by row."""
        counts = self.ends - self.begins
        owners = np.repeat(self.rows, counts)
        # consecutive places from each run's begin: 0, 1, 2, ... minus how many came before in other runs
        places = np.arange(len(owners)) + np.repeat(self.begins - np.cumsum(counts) + counts, counts)
        chosen = block.flatten().index_select(0, torch.from_numpy(places).to(block.device))
        return sums.index_add_(0, torch.from_numpy(owners).to(block.device), chosen.double())


def runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ascending values (m,), each once, and where its run of entries ends: (runs,), (runs,)."""
    ends = np.append(np.flatnonzero(np.diff(values)) + 1, len(values))
    return values[ends - 1], ends


TARGET, TOTAL = 0, 1  # the two sums


class TargetMass:
    """Accumulates log sum exp(similarity) block by block, over the entries whose value is the target and in total.

    At several sharpnesses at once, where asked to: the similarities times each of ``factors``.
    """

    def __init__(
        self, targets: np.ndarray, factors: list[float], device: torch.device | str = "cpu", keep_mean: bool = False
    ):
        """
        Args:
            targets: (n,)
            keep_mean: whether ``mean_log_mass`` will be asked for
        """
        self.targets = np.asarray(targets, np.int64)
        self._factors, self._device = factors, torch.device(device)
        self._sums = torch.full((2, len(factors), len(targets)), -torch.inf, dtype=torch.double, device=device)
        self._sum_of_logs = self._sums[TOTAL].new_zeros((len(factors), len(targets))) if keep_mean else None
        self._blocks = self._sums.new_zeros(len(targets)) if keep_mean else None
        self._lock = Lock()

    def add(
        self, rows: Tensor, similarities: Tensor, constants: Tensor, run_values: np.ndarray, run_ends: np.ndarray
    ) -> None:
        """The queries ``rows`` (r,) see a block of entries, in the order of their values. Thread-safe.

        The similarities are the sum of (r, m) and (r,), as block_distances returns them; the former are overwritten.
        """
        targets = TargetRuns(run_values, run_ends, self.targets[rows.numpy()])
        new = log_masses(similarities, constants, targets, self._factors)
        rows = rows.to(self._device)
        with self._lock:
            self._sums[:, :, rows] = torch.logaddexp(self._sums[:, :, rows], new)
            if self._sum_of_logs is not None and self._blocks is not None:
                self._sum_of_logs[:, rows] += new[TOTAL]
                self._blocks[rows] += 1

    def mean_log_mass(self) -> Tensor:
        """The mean, over the blocks that a query has seen, of the log of their mass: (factors, n)."""
        assert self._sum_of_logs is not None and self._blocks is not None
        return (self._sum_of_logs / self._blocks.clamp(min=1)).cpu()

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """log target mass (factors, n), log total mass (factors, n)."""
        sums = self._sums.cpu().numpy()
        return sums[TARGET], sums[TOTAL]


def log_masses(similarities: Tensor, constants: Tensor, targets: TargetRuns, factors: list[float]) -> Tensor:
    """Log mass of the target and in total, of similarities (r, m) + constants (r,): (2, factors, r) double.

    The similarities are overwritten.
    """
    largest = similarities.amax(dim=1, keepdim=True)
    similarities -= largest  # now exp cannot overflow, and the nearest entry counts 1
    shares: dict[float, Tensor] = {}
    # In double precision: thousands of blocks are added up, at magnitudes where floats have few digits left.
    masses = torch.empty((2, len(factors), len(constants)), dtype=torch.double, device=constants.device)
    for number, factor in sorted(enumerate(factors), key=lambda numbered: numbered[1]):
        # exp(2 s) is exp(s) squared, several times as fast as another exp
        half = shares.pop(factor / 2, None)
        if half is not None:
            share = half.square_()
        elif factors == [1]:  # then the similarities need not be kept for another factor
            share = similarities.exp_()
        else:
            share = (similarities * factor).exp_()
        shares[factor] = share
        masses[TOTAL, number] = share.sum(dim=1)
        masses[TARGET, number] = targets.sums(share)
    largest = largest[:, 0].double() + constants
    return masses.log_().add_(torch.tensor(factors, dtype=torch.double, device=masses.device)[:, None] * largest)
