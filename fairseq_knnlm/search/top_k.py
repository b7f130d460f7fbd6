"""The k nearest of a stream of candidates: guess a threshold from a sample, keep what is below, sort once.

With k around 1024, selecting costs more than computing distances. A threshold that lets a little more than k candidates
through makes it one comparison a candidate. A guess that was wrong is noticed, and the query is searched plainly.
"""

import math
from collections.abc import Iterator
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from ..parallel import for_each
from .packed import ABSENT, pack, smallest, unpack

PARTS_A_THREAD = 2  # of 1024 queries, whose neighbours are returned together
SAMPLE_STRIDE = 16  # one candidate in 16 is looked at to guess the threshold


def sample_rank(k: int) -> int:
    """Which sampled candidate is the threshold, so that about one query in a thousand gets fewer than k.

    The number of samples among the k nearest has mean and variance of about k / stride.
    """
    expected = k / SAMPLE_STRIDE
    return math.ceil(expected + 3.5 * math.sqrt(expected) + 4)


def capacity(k: int) -> int:
    """Room for the candidates below the threshold, of which there are stride * rank, give or take.

    One query in a thousand has more.
    """
    rank = sample_rank(k)
    return math.ceil(SAMPLE_STRIDE * (rank + 3 * math.sqrt(rank)))


class Thresholds:
    """Per query the ``sample_rank``-th smallest of the sampled distances (infinite where there are fewer)."""

    def __init__(self, count: int, max_samples: int, k: int, device: torch.device | str = "cpu"):
        self._rank = sample_rank(k)
        self._samples = torch.full((count, max(max_samples, self._rank)), math.inf, device=device)
        self._filled = torch.zeros(count, dtype=torch.long, device=device)
        self._lock = Lock()

    def add(self, rows: Tensor, distances: Tensor, constants: Tensor) -> None:
        """rows (r,); the sum of distances (r, m) and constants (r,) is that of sampled candidates. Thread-safe."""
        distances, rows = distances + constants[:, None], rows.to(distances.device)
        with self._lock:
            columns = self._filled[rows][:, None] + torch.arange(distances.size(1), device=distances.device)
            self._samples[rows[:, None], columns] = distances
            self._filled[rows] += distances.size(1)

    def result(self) -> Tensor:
        if self._samples.device.type != "cpu":
            return self._samples.kthvalue(self._rank, dim=1).values
        samples = self._samples.numpy()
        # NumPy's partition is vectorised, and several times as fast as torch's kthvalue and topk.
        for_each(lambda rows: samples[rows].partition(self._rank - 1, axis=1), _parts(len(samples)))
        return self._samples[:, self._rank - 1].clone()


class NearestCandidates:
    """Keeps the candidates below each query's threshold."""

    def __init__(self, thresholds: Tensor, k: int):
        self._thresholds, self._k = thresholds, k
        self._capacity = capacity(k)
        self._candidates = torch.full((len(thresholds), self._capacity), ABSENT, device=thresholds.device)
        self._filled = torch.zeros(len(thresholds), dtype=torch.long, device=thresholds.device)
        self._seen = torch.zeros_like(self._filled)
        self._lock = Lock()

    def add(self, rows: Tensor, distances: Tensor, constants: Tensor, ids: np.ndarray) -> None:
        """rows (r,), ids (m,); the distances are the sum of (r, m) and (r,). Thread-safe.

        Example: 3 queries, which have kept 5, 0 and 7 candidates so far, see a block of 4 entries, of which these (x)
        are below their thresholds:

            . x . x        counts    2, 0, 1     how many each query keeps of this block
            . . . .        row       0, 0, 2     the query of each kept candidate
            x . . .        column    1, 3, 0     its entry
                           place     5, 6, 7     where it goes among the candidates of its query
        """
        rows = rows.to(distances.device)
        below = distances <= (self._thresholds[rows] - constants)[:, None]
        counts = below.sum(dim=1)
        flat = below.flatten().nonzero()[:, 0]  # row by row, so all candidates of a query follow each other
        row = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), counts)
        column = flat - row * distances.size(1)
        kept = pack(distances.flatten()[flat] + constants[row], torch.from_numpy(ids).to(rows.device)[column])
        with self._lock:
            filled = self._filled[rows]
            self._filled[rows] = filled + counts
            self._seen[rows] += distances.size(1)
        # Each block has places of its own now, so writing needs no lock.
        first_of_row = counts.cumsum(0) - counts  # the number, among all kept of this block, of each query's first
        place = filled[row] + torch.arange(len(row), device=row.device) - first_of_row[row]
        if (filled + counts).max() > self._capacity:
            fits = place < self._capacity
            row, place, kept = row[fits], place[fits], kept[fits]
        first_slot = rows * self._capacity  # where each query's candidates begin
        self._candidates.flatten()[first_slot[row] + place] = kept

    def parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of some rows at a time: distances (rows, k), ids (rows, k), best first, and whether each row's threshold was
        right (rows,).
        """
        k = min(self._k, self._capacity)

        def select(rows: slice) -> tuple[Tensor, Tensor]:
            return unpack(smallest(self._candidates[rows], k))

        enough = (self._filled >= self._k) | (self._filled == self._seen)
        right = enough & (self._filled <= self._capacity)
        parts = _parts(len(self._filled))
        step = PARTS_A_THREAD * torch.get_num_threads()
        for first in range(0, len(parts), step):
            some = parts[first : first + step]
            distances, ids = zip(*for_each(select, some))
            yield torch.cat(distances), torch.cat(ids), right[some[0][0].start : some[-1][0].stop]


def _parts(count: int) -> list[tuple[slice]]:
    """Rows for one thread at a time."""
    return [(slice(start, start + 1024),) for start in range(0, count, 1024)]


class RunningNearest:
    """The k nearest of blocks that come one after the other: what beats the k-th best so far is kept.

    No guess to go wrong, but the threshold is tight only after many candidates. For one thread.
    """

    def __init__(self, count: int, k: int, block_size: int):
        """For ``count`` queries and blocks of up to ``block_size`` candidates."""
        self._k = k
        shape = (count, k + block_size)
        self._distances = torch.full(shape, math.inf)
        self._ids = torch.full(shape, -1, dtype=torch.long)
        self._filled = torch.zeros(count, dtype=torch.long)
        self._thresholds = torch.full((count,), math.inf)

    def add(self, distances: Tensor, constants: Tensor, first_id: int) -> None:
        """The candidates ``first_id``, ``first_id + 1``, ...; their distances are the sum of (n, m) and (n,)."""
        below = distances < (self._thresholds - constants)[:, None]
        row, column = below.nonzero(as_tuple=True)  # row by row
        counts = torch.bincount(row, minlength=len(distances))
        if (self._filled + counts).max() > self._distances.size(1):
            self._shrink()
        place = self._filled[row] + torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
        self._distances[row, place] = distances[row, column] + constants[row]
        self._ids[row, place] = column + first_id
        self._filled += counts

    def _shrink(self) -> None:
        distances, places = self._distances.topk(self._k, dim=1, largest=False)
        self._ids[:, : self._k] = self._ids.gather(1, places)
        self._distances[:, : self._k] = distances
        self._distances[:, self._k :] = math.inf
        self._filled.clamp_(max=self._k)
        self._thresholds = distances[:, -1].clone()

    def result(self) -> tuple[Tensor, Tensor]:
        """distances (n, k), ids (n, k), best first."""
        self._shrink()
        return self._distances[:, : self._k], self._ids[:, : self._k]
