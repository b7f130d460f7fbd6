"""The k nearest of a stream of candidates: guess a threshold from a sample, keep what is below, sort once.

With k around 1024, selecting costs more than computing distances. A threshold that lets a little more than k candidates
through makes it one comparison a candidate. A guess that was wrong is noticed, and the query is searched plainly.
"""

import math
from threading import Lock

import numpy as np
import torch
from torch import Tensor

SAMPLE_STRIDE = 32  # one candidate in 32 is looked at to guess the threshold


def sample_rank(k: int) -> int:
    """Which sampled candidate is the threshold, so that about one query in a thousand gets fewer than k.

    The number of samples among the k nearest has mean and variance of about k / stride.
    """
    expected = k / SAMPLE_STRIDE
    return math.ceil(expected + 3.5 * math.sqrt(expected) + 4)


class Thresholds:
    """Per query the ``sample_rank``-th smallest of the sampled distances (infinite where there are fewer)."""

    def __init__(self, count: int, max_samples: int, k: int):
        self._rank = sample_rank(k)
        self._samples = torch.full((count, max(max_samples, self._rank)), math.inf)
        self._filled = torch.zeros(count, dtype=torch.long)
        self._lock = Lock()

    def add(self, rows: Tensor, distances: Tensor, constants: Tensor) -> None:
        """rows (r,); the sum of distances (r, m) and constants (r,) is that of sampled candidates. Thread-safe."""
        distances = distances + constants[:, None]
        with self._lock:
            columns = self._filled[rows][:, None] + torch.arange(distances.size(1))
            self._samples[rows[:, None], columns] = distances
            self._filled[rows] += distances.size(1)

    def result(self) -> Tensor:
        return self._samples.kthvalue(self._rank, dim=1).values


class NearestCandidates:
    """Keeps the candidates below each query's threshold."""

    def __init__(self, thresholds: Tensor, k: int):
        self._thresholds, self._k = thresholds, k
        self._capacity = max(2 * k, 2 * SAMPLE_STRIDE * sample_rank(k))
        shape = (len(thresholds), self._capacity)
        self._distances = torch.full(shape, math.inf)
        self._ids = torch.full(shape, -1, dtype=torch.long)
        self._filled = torch.zeros(len(thresholds), dtype=torch.long)
        self._seen = torch.zeros(len(thresholds), dtype=torch.long)
        self._lock = Lock()

    def add(self, rows: Tensor, distances: Tensor, constants: Tensor, ids: np.ndarray) -> None:
        """rows (r,), ids (m,); the distances are the sum of (r, m) and (r,). Thread-safe."""
        below = distances <= (self._thresholds[rows] - constants)[:, None]
        row, column = below.nonzero(as_tuple=True)  # row by row
        counts = torch.bincount(row, minlength=len(rows))
        place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
        kept, kept_ids = distances[row, column] + constants[row], torch.from_numpy(ids)[column]
        with self._lock:
            filled = self._filled[rows]
            self._filled[rows] = filled + counts
            self._seen[rows] += distances.size(1)
        # Each block has places of its own now, so writing needs no lock.
        place += filled[row]
        if len(place) and place.max() >= self._capacity:
            fits = place < self._capacity
            row, place, kept, kept_ids = row[fits], place[fits], kept[fits], kept_ids[fits]
        self._distances[rows[row], place] = kept
        self._ids[rows[row], place] = kept_ids

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """distances (n, k), ids (n, k), best first, and which rows (n,) are right (their threshold was)."""
        distances, places = self._distances.topk(min(self._k, self._capacity), dim=1, largest=False)
        enough = (self._filled >= self._k) | (self._filled == self._seen)
        return distances, self._ids.gather(1, places), enough & (self._filled <= self._capacity)


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
