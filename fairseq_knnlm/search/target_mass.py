"""Two sums per query instead of a sorted list: the mass of all entries, and of those whose value is the target.

Integers (which entries are a query's target) are found on the CPU; floats stay on the device where the search runs.
"""

import math
from threading import Lock
from typing import Optional

import numpy as np
import torch
from torch import Tensor

from ..parallel import Unlocked
from .masses import Masses


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
        """The sum of each row's run: (r, m) -> (r,) double. There may be a gap between two rows."""
        if block.device.type != "cpu":
            return self._gathered_sums(block, torch.zeros(len(block), dtype=torch.double, device=block.device))
        sums = np.zeros(len(block))
        if len(self.rows) == 0:
            return torch.from_numpy(sums)
        # from edge to edge: a run, what lies between two runs, a run, ...; for NumPy one pass over the block
        gaps = self.rows * (block.stride(0) - block.size(1))  # before each row
        edges = np.empty(2 * len(self.rows), np.int64)
        edges[::2], edges[1::2] = self.begins + gaps, self.ends + gaps
        numbers = block.as_strided((block.stride(0) * (len(block) - 1) + block.size(1),), (1,)).numpy()
        if edges[-1] == len(numbers):
            edges = edges[:-1]  # reduceat takes no edge there, and sums up to the end by itself
        sums[self.rows] = np.add.reduceat(numbers, edges)[::2]
        return torch.from_numpy(sums)

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


def log_masses_of_runs(similarities: np.ndarray, run_ends: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Log of the mass of each run of entries, and of each list, of one query: similarities (m,) double.

    Args:
        run_ends: for each list, where its runs end in it; no list is empty

    Returns:
        (runs,) and (lists,)
    """
    runs_per_list = np.array([len(ends) for ends in run_ends])
    sizes = np.array([ends[-1] for ends in run_ends])
    ends = np.concatenate(run_ends) + np.repeat(np.cumsum(sizes) - sizes, runs_per_list)  # counted through all lists
    masses = log_sums(similarities, np.concatenate([[0], ends[:-1]]))
    return masses, log_sums(masses, np.cumsum(runs_per_list) - runs_per_list)


def log_sums(numbers: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """log sum exp of consecutive parts of some numbers (m,), which begin there (parts,): (parts,)."""
    largest = np.maximum.reduceat(numbers, begins)
    sizes = np.diff(begins, append=len(numbers))
    return largest + np.log(np.add.reduceat(np.exp(numbers - np.repeat(largest, sizes)), begins))


TARGET, TOTAL = 0, 1  # the two sums
LOG2_E = 1 / math.log(2)


class TargetMass:
    """Accumulates log sum exp(similarity) block by block, over the entries whose value is the target and in total.

    At several sharpnesses at once, where asked to: the similarities times each of ``factors``.
    """

    def __init__(
        self,
        targets: np.ndarray,
        factors: list[float],
        device: torch.device | str = "cpu",
        keep_mean: bool = False,
        near: np.ndarray | None = None,
    ):
        """
        Args:
            targets: (n,)
            keep_mean: whether the mean log mass of a list will be asked for
            near: (n, nprobe) the lists of each query, nearest first, where sums by rank will be asked for
        """
        self.targets = np.asarray(targets, np.int64)
        self._factors, self._device = factors, torch.device(device)
        self._sums = torch.full((2, len(factors), len(targets)), -torch.inf, dtype=torch.double, device=device)
        self._sum_of_logs = self._sums[TOTAL].new_zeros((len(factors), len(targets))) if keep_mean else None
        self._blocks = self._sums.new_zeros(len(targets)) if keep_mean else None
        self._largest = torch.full((len(targets),), -torch.inf, dtype=torch.double, device=device)
        self._near, self._ranked = near, None
        if near is not None:
            self._ranked = self._sums.new_full((2, ranks(near.shape[1]), len(targets)), -torch.inf)
        self._lock = Lock()

    def add(
        self,
        rows: Tensor,
        similarities: Tensor,
        constants: Tensor,
        run_values: np.ndarray,
        run_ends: np.ndarray,
        number: int = -1,
        weights: Tensor | None = None,
    ) -> None:
        """The queries ``rows`` (r,) see a block of entries, in the order of their values. Thread-safe.

        The similarities are the sum of (r, m) and (r,), as block_distances returns them; the former are overwritten.

        Args:
            number: of the list that the block is, where sums by rank will be asked for
            weights: of the entries, (m,) on the device; None: each counts 1
        """
        nearest = similarities.amax(dim=1, keepdim=True)
        targets = TargetRuns(run_values, run_ends, self.targets[rows.numpy()])
        new = log_masses(similarities, constants, targets, self._factors, nearest, weights)
        self._add_logs(rows, new, nearest[:, 0].double() + constants, number)

    def add_shares(
        self,
        rows: Tensor,
        shares: Tensor,
        total: Tensor,
        nearest: Tensor,
        run_values: np.ndarray,
        run_ends: np.ndarray,
        number: int = -1,
    ) -> None:
        """The same at the first sharpness alone, of what ``shares_of_block`` returns."""
        target = TargetRuns(run_values, run_ends, self.targets[rows.numpy()]).sums(shares)
        self._add_logs(rows, _log_masses(target, total, nearest), nearest, number)

    def _add_logs(self, rows: Tensor, new: Tensor, nearest: Tensor, number: int) -> None:
        """Log masses of a block (2, factors, r) and its largest similarities (r,)."""
        rank = None if self._near is None else rank_of(self._near[rows.numpy()], number).to(self._device)
        rows = rows.to(self._device)
        with self._lock:
            _add_up(self._sums.flatten(0, 1), self._largest, self._sum_of_logs, self._blocks, rows, new, nearest)
            if self._ranked is not None:
                self._ranked[:, rank, rows] = torch.logaddexp(self._ranked[:, rank, rows], new[:, 0])

    def result(self) -> Masses:
        target, total = self._sums.cpu().numpy()
        found = Masses(target, total, largest=self._largest.cpu().numpy())
        if self._sum_of_logs is not None and self._blocks is not None:
            found.sum_of_logs, found.lists = self._sum_of_logs.cpu().numpy(), self._blocks.cpu().numpy()
        if self._ranked is not None:
            found.ranked = self._ranked.cpu().numpy()
        return found


@Unlocked
def _log_masses(target: Tensor, total: Tensor, nearest: Tensor) -> Tensor:
    """Sums (r,), (r,) in units of the largest mass, whose logs are given (r,) -> (2, 1, r)."""
    return torch.stack([target, total]).log_().add_(nearest).unsqueeze(1)


@Unlocked
def _add_up(
    sums: Tensor,
    largest: Tensor,
    sum_of_logs: Optional[Tensor],
    blocks: Optional[Tensor],
    rows: Tensor,
    new: Tensor,
    nearest: Tensor,
) -> None:
    """What a block of entries adds to the sums of some rows (r,); see ``TargetMass``."""
    sums.index_copy_(1, rows, torch.logaddexp(sums.index_select(1, rows), new.flatten(0, 1)))
    largest.index_copy_(0, rows, torch.maximum(largest.index_select(0, rows), nearest))
    if sum_of_logs is not None and blocks is not None:
        sum_of_logs.index_add_(1, rows, new[1])
        blocks.index_add_(0, rows, torch.ones_like(nearest))


def ranks(nprobe: int) -> int:
    """How many ranks so many lists have: the nearest, the next, the next 2, the next 4, ..."""
    return (nprobe - 1).bit_length() + 1


def rank_of(near: np.ndarray, number: int) -> Tensor:
    """The rank of a list for each query that visits it: its lists (r, nprobe), nearest first -> (r,)."""
    places = (near == number).argmax(axis=1)
    return torch.from_numpy(np.frexp(places)[1].astype(np.int64))  # the number of binary digits: 0, 1, 2, 2, 3, ...


def log_masses(
    similarities: Tensor,
    constants: Tensor,
    targets: TargetRuns,
    factors: list[float],
    largest: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Log mass of the target and in total, of similarities (r, m) + constants (r,): (2, factors, r) double.

    The similarities are overwritten.

    Args:
        largest: (r, 1) of each row of the similarities, where it is known
        weights: of the entries, (m,), the same at every sharpness; None: each counts 1
    """
    largest = similarities.amax(dim=1, keepdim=True) if largest is None else largest
    similarities -= largest  # now the exponential cannot overflow, and the nearest entry counts 1
    similarities *= LOG2_E  # torch's exp2 is four times as fast as its exp on a CPU
    shares: dict[float, Tensor] = {}
    # In double precision: thousands of blocks are added up, at magnitudes where floats have few digits left.
    masses = torch.empty((2, len(factors), len(constants)), dtype=torch.double, device=constants.device)
    for number, factor in sorted(enumerate(factors), key=lambda numbered: numbered[1]):
        # exp(2 s) is exp(s) squared, which is faster than another exponential
        half = shares.pop(factor / 2, None)
        if half is not None:
            share = half.square_()
        elif factors == [1]:  # then the similarities need not be kept for another factor
            share = similarities.exp2_()
        else:
            share = (similarities * factor).exp2_()
        shares[factor] = share
        counted = share if weights is None else share * weights  # the shares themselves may still be squared
        masses[TOTAL, number] = counted.sum(dim=1)
        masses[TARGET, number] = targets.sums(counted)
    largest = largest[:, 0].double() + constants
    for number, factor in enumerate(factors):
        masses[:, number].log_().add_(largest, alpha=factor)
    return masses


def shares_of_block(
    similarities: Tensor, constants: Tensor, weights: Optional[Tensor], log2_e: float = LOG2_E
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``log_masses`` at a single sharpness, before logarithms are taken.

    Returns:
        the mass of each entry in units of its row's largest (r, m), which overwrites the similarities; their sums (r,)
        and the row's largest similarity (r,), both double
    """
    largest = similarities.amax(dim=1, keepdim=True)
    similarities -= largest
    similarities *= log2_e
    similarities.exp2_()
    if weights is not None:
        similarities *= weights
    return similarities, similarities.sum(dim=1).double(), largest.squeeze(1).double() + constants
