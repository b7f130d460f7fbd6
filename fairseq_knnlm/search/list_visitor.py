"""Visiting inverted lists on one device: each visited list is read once, for all queries that visit it.

A visitor has all lists of an index or a range of them. What several visitors find of their own lists is joined by
``ListSearch``, so that one device, several GPUs and a part of an index are the same code.
"""

from collections.abc import Callable, Iterator
from typing import Optional

import numpy as np
import torch
from torch import Tensor

from ..datastore import Datastore
from ..parallel import Unlocked, for_each
from .distances import block_distances, inner_products, l2_distances, similarity_scale
from .list_blocks import KeyDecoder, ListBlock, Lists, decoded
from .masses import Masses
from .one_query import OneQueryScan, Runs
from .target_mass import TargetMass, log_masses_of_runs, shares_of_block
from .top_k import SAMPLE_STRIDE, NearestCandidates, Thresholds
from .visitor import Found, VisitedMasses
from .visits import group_by_list

MOST_PAIRS = 1 << 24  # of a query and an entry, whose distances are in memory at once in a thread
LONG_SEARCH = 8192  # queries, from which on there is a progress bar

Consume = Callable[[Tensor, ListBlock, Tensor, Tensor], None]
class ListVisitor:
    """Computes distances to the entries of lists, and what follows from them, on one device."""

    def __init__(
        self,
        lists: Lists,
        datastore: Datastore,
        metric: str,
        device: torch.device,
        means: np.ndarray | None = None,
        precision: torch.dtype = torch.float32,
        lists_range: tuple[int, int] | None = None,
        scan: OneQueryScan | None = None,
    ):
        """
        Args:
            means: of the keys of every list, (lists, dim), where they are known
            precision: of the factors of a product of queries and keys
            lists_range: the first list that is this visitor's own, and the one after the last; None: all
            scan: how one query meets the entries of lists, where there is a faster way than by torch
        """
        self._scan = scan
        self.lists, self.metric, self.device, self._precision = lists, metric, device, precision
        self._first, self._stop = lists_range or (0, len(lists.sizes))
        self._means = None if means is None else torch.from_numpy(means).to(device)
        self._decoder = KeyDecoder(datastore.codec, device)

    def masses(
        self,
        vectors: Tensor,
        targets: np.ndarray,
        near: np.ndarray,
        temperatures: list[float],
        keep_mean: bool,
        keep_ranks: bool = False,
    ) -> Masses:
        """The two sums over the entries of the visited lists, for queries (n, dim) and the lists of each (n, nprobe).

        Args:
            targets: (n,)
            keep_mean: whether the mean log mass of a list will be asked for
            keep_ranks: whether sums by the rank of a list will be asked for
        """
        factors = [temperatures[0] / temperature for temperature in temperatures]
        mass = TargetMass(targets, factors, self.device, keep_mean, near if keep_ranks else None)
        scale = similarity_scale(self.metric, temperatures[0])

        def consume(rows: Tensor, block: ListBlock, similarities: Tensor, constants: Tensor) -> None:
            weights = None if block.weights is None else block.weights.to(self.device)
            mass.add(rows, similarities, constants, block.run_values, block.run_ends, block.number, weights)

        def add(rows: Tensor, block: ListBlock) -> None:
            shares, total, nearest = _shares_of_list(
                vectors, rows, block.stored, self._origin(block), self._decoder.step, self._decoder.lowest,
                self.metric == "ip", scale, block.weights,
            )  # fmt: skip
            mass.add_shares(rows, shares, total, nearest, block.run_values, block.run_ends, block.number)

        if len(factors) == 1 and self.device.type == "cpu" and self._precision == torch.float32:
            self._meet_lists(near, add)
        else:
            self._visit(vectors, near, consume, scale)
        return mass.result()

    def nearest(self, vectors: Tensor, near: np.ndarray, k: int, max_samples: int) -> Iterator[Found]:
        """The k nearest entries of the visited lists, some consecutive rows at a time, best first.

        Args:
            near: the lists that each query visits, (n, nprobe)
            max_samples: at most so many entries of a query are looked at to guess its threshold
        """
        sign = -1.0 if self.metric == "ip" else 1.0  # the smaller the better, whatever the metric
        thresholds = Thresholds(len(near), max_samples, k, self.device)
        self._visit(
            vectors,
            near,
            lambda rows, _, distances, constants: thresholds.add(rows, distances, constants),
            sign,
            every=SAMPLE_STRIDE,
        )
        nearest = NearestCandidates(thresholds.result(), k)
        self._visit(
            vectors,
            near,
            lambda rows, block, distances, constants: nearest.add(rows, distances, constants, block.ids),
            sign,
        )
        # Not a generator function: all lists are visited when this returns, so that several visitors work in parallel.
        return (
            (distances.mul_(sign).cpu().numpy(), ids.cpu().numpy(), right.cpu().numpy())
            for distances, ids, right in nearest.parts()
        )

    def visited(self, vector: Tensor, near: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Every entry that one query (1, dim) visits in the lists ``near``, in any order: distances (m,), ids (m,)."""
        distances, ids, _ = self._meet(vector, near)
        return distances, ids

    def visited_masses(self, vector: Tensor, near: np.ndarray, scale: float) -> VisitedMasses:
        """Values that one query (1, dim) visits (they may repeat), their log masses, and the log mass of each list."""
        distances, _, runs = self._meet(vector, near)
        if not runs:
            return np.empty(0, np.int64), np.empty(0), np.empty(0)
        similarities = distances.astype(np.float64) * scale
        weights = [part.weights for part in runs if part.weights is not None]
        if weights:
            similarities += torch.cat(weights).log().cpu().numpy()
        masses, totals = log_masses_of_runs(similarities, [part.ends for part in runs])
        return np.concatenate([part.values for part in runs]), masses, totals

    def _meet(self, vector: Tensor, near: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[Runs]]:
        """One query (1, dim) and all entries of its lists that are this visitor's own, in the order of the file.

        Distances (m,), ids (m,), and the runs of equal values in each of the lists.
        """
        numbers = np.unique(near[(near >= self._first) & (near < self._stop)])
        numbers = numbers[self.lists.sizes[numbers] > 0]
        if not len(numbers):
            return np.empty(0, np.float32), np.empty(0, np.int64), []
        if self._scan is not None:
            return self._scan(vector.numpy(), numbers)
        blocks = list(self.lists.stream(numbers))
        found = self.distances_of_one(vector, torch.cat([block.stored for block in blocks]))
        ids = np.concatenate([block.ids for block in blocks])
        return found.cpu().numpy(), ids, [Runs(block.run_values, block.run_ends, block.weights) for block in blocks]

    def nearest_plainly(self, vectors: Tensor, near: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest of few queries (n, dim), one after the other: distances (n, k), ids (n, k), -1 for none."""
        sign = -1.0 if self.metric == "ip" else 1.0
        distances = np.full((len(vectors), k), sign * np.inf, np.float32)
        ids = np.full((len(vectors), k), -1, np.int64)
        for row in range(len(vectors)):
            found, entries = self.visited(vectors[row : row + 1], near[row])
            best = np.argsort(sign * found, kind="stable")[:k]
            distances[row, : len(best)], ids[row, : len(best)] = found[best], entries[best]
        return distances, ids

    def distances_of_one(self, vector: Tensor, stored: Tensor) -> Tensor:
        """Distances of one query (1, dim) and stored keys (m, dim), without cancellation: (m,)."""
        if self.metric == "ip":
            # Not as a product of a matrix and a vector, whose rounding depends on how many rows the matrix has.
            return (self._decoder.decode(stored, None) * vector[0]).sum(dim=1)
        return torch.linalg.vector_norm(self._decoder.decode(stored, vector[0]), dim=1).square_()

    def _visit(self, vectors: Tensor, near: np.ndarray, consume: Consume, scale: float, every: int = 1) -> None:
        """For each visited list: consume(queries (r,) that visit it, the list, distances of its entries).

        The distances are multiplied by ``scale`` and come in two summands, (r, m) and (r,).

        Args:
            every: look at one entry in so many
        """

        def visit(rows: Tensor, block: ListBlock) -> None:
            own, origin = vectors.index_select(0, rows.to(self.device)), self._origin(block)
            keys = self._decoder.decode(block.stored[::every], origin)
            if origin is not None:
                own -= origin
            consume(rows, block, *block_distances(own, keys, self.metric, scale, self._precision))

        self._meet_lists(near, visit)

    def _meet_lists(self, near: np.ndarray, visit: Callable[[Tensor, ListBlock], None]) -> None:
        """For each visited list: visit(queries (r,) that visit it, the list), some of the queries at a time."""
        visits = group_by_list(np.where((near >= self._first) & (near < self._stop), near, -1), len(self.lists.sizes))
        numbers = np.array([number for number in visits if self.lists.sizes[number]], np.int64)

        def meet(block: ListBlock) -> None:
            rows = torch.from_numpy(visits[block.number])
            for some in rows.split(max(1, MOST_PAIRS // len(block.ids))):
                visit(some, block)

        jobs, name = ((block,) for block in self.lists.stream(numbers)), "searching"
        if self.device.type == "cpu":  # one list per thread
            for_each(meet, jobs, name if len(near) >= LONG_SEARCH else None, len(numbers))
        else:
            for job in jobs:
                meet(*job)

    def _origin(self, block: ListBlock) -> Tensor | None:
        """A point near the keys of a list, (dim,), which distances are relative to; inner products cannot be."""
        if self.metric == "ip":
            return None
        return self._decoder.decode(block.stored[:1], None)[0] if self._means is None else self._means[block.number]


@Unlocked
def _shares_of_list(
    vectors: Tensor,
    rows: Tensor,
    stored: Tensor,
    origin: Optional[Tensor],
    step: Optional[Tensor],
    lowest: Optional[Tensor],
    inner: bool,
    scale: float,
    weights: Optional[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``shares_of_block`` returns of a list, for the queries ``rows`` (r,) of all ``vectors`` (n, dim).

    From codes to sums without Python's lock, which is what lets threads work at the same time.
    """
    queries, keys = vectors.index_select(0, rows), decoded(stored, origin, step, lowest)
    if inner:
        similarities, constants = inner_products(queries, keys, scale)
    else:
        similarities, constants = l2_distances(queries if origin is None else queries - origin, keys, scale)
    return shares_of_block(similarities, constants, weights)
