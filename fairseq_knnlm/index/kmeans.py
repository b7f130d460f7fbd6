"""k-means and nearest centroids as matrix products in torch, several times as fast as the BLAS in FAISS's wheels."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..parallel import for_each
from ..products import product
from ..progress import each

ROWS = 1 << 14  # vectors compared with all centroids at once
ROUNDS = 10  # of k-means
TILE = 64  # centroids, see _Tiles
ROWS_OF_CANDIDATES = 2048  # vectors whose candidates are in memory at once in a thread
POINTS_PER_GROUP = 256  # that find the centre of a group
FLOATS_AT_ONCE = 1 << 27  # of vectors that are clustered in one pass over the sample: 512 MiB


def nearest_centroids(vectors: Tensor, centroids: Tensor, metric: str, count: int = 1) -> Tensor:
    """The ``count`` best centroids of each vector, best first: (n, dim), (c, dim) -> (n, count)."""
    return best_centroids(vectors, centroids, metric, count)[0]


def best_centroids(vectors: Tensor, centroids: Tensor, metric: str, count: int = 1) -> tuple[Tensor, Tensor]:
    """As ``nearest_centroids``, and their scores: v.c for inner products, v.c - |c|^2 / 2 for L2 distances."""
    bias = _bias(centroids, metric)
    numbers, scores = [], []
    for part in vectors.split(ROWS):
        found = product(part.float(), centroids, bias)
        best = found.max(dim=1, keepdim=True) if count == 1 else found.topk(count, dim=1)
        numbers.append(best.indices)
        scores.append(best.values)
    return torch.cat(numbers), torch.cat(scores)


def _bias(centroids: Tensor, metric: str) -> Tensor:
    """What v.c lacks to rank centroids: -|v - c|^2 / 2 without |v|^2, which all have in common; or nothing."""
    return centroids.new_zeros(len(centroids)) if metric == "ip" else (centroids * centroids).sum(dim=1).mul_(-0.5)


class GroupedCentroids:
    """Centroids that are in groups themselves: a vector is compared with those of the groups nearest to it only."""

    def __init__(self, centres: Tensor, centroids: Tensor, metric: str):
        """centres of the groups (g, dim), centroids (c, dim)."""
        group = nearest_centroids(centroids, centres, metric)[:, 0]
        used = group.unique()  # a vector must not end in groups that have no centroids
        self._centres, self._metric = centres[used], metric
        self._members = [(group == number).nonzero()[:, 0] for number in used]
        self._centroids = [centroids[numbers] for numbers in self._members]
        self._biases = [_bias(part, metric) for part in self._centroids]

    def nearest(self, vectors: Tensor, probe: int) -> Tensor:
        """The best centroid of each vector among those of its ``probe`` nearest groups: (n, dim) -> (n,)."""
        return torch.cat(for_each(self._nearest, [(part, probe) for part in vectors.split(ROWS)]))

    def best(self, vectors: Tensor, probe: int, count: int) -> tuple[Tensor, Tensor]:
        """The ``count`` best centroids of each vector, best first, likewise, and their scores.

        (n, dim) -> (n, count), -1: none; (n, count), as ``best_centroids`` has them.
        """
        if len(vectors) == 1:
            return self._best_of_one(vectors, probe, count)
        parts = for_each(self._best, [(part, probe, count) for part in vectors.split(ROWS_OF_CANDIDATES)])
        if not parts:
            return torch.empty((0, count), dtype=torch.long), torch.empty((0, count))
        numbers, scores = zip(*parts)
        return torch.cat(numbers), torch.cat(scores)

    def _best_of_one(self, vector: Tensor, probe: int, count: int) -> tuple[Tensor, Tensor]:
        """As ``best`` for one vector (1, dim): to bring its scores into tiles would cost more than the scores do."""
        groups = nearest_centroids(vector, self._centres, self._metric, min(probe, len(self._centres)))[0].tolist()
        scores = torch.cat([product(vector, self._centroids[g], self._biases[g]) for g in groups], dim=1)
        members = torch.cat([self._members[group] for group in groups])
        columns, chosen = _largest(scores, min(count, len(members)))
        missing = (0, count - columns.size(1))
        return F.pad(members[columns], missing, value=-1), F.pad(chosen, missing, value=-torch.inf)

    @cached_property
    def _tiles(self) -> "_Tiles":
        return _Tiles(self._members, self._centroids, self._biases)

    def _best(self, vectors: Tensor, probe: int, count: int) -> tuple[Tensor, Tensor]:
        """Collect the scores of all members of the probed groups, side by side for each vector; then select.

        Example: groups 0 and 2 have 2 tiles and 1 tile; a vector that probes both has the scores of the former in
        columns 0 to 127 of its row, of the latter in columns 128 to 191.
        """
        probe, tiles = min(probe, len(self._centres)), self._tiles
        groups = nearest_centroids(vectors, self._centres, self._metric, probe)  # (n, probe)
        ends = tiles.counts[groups].cumsum(dim=1)
        width = max(int(ends.max()), -(-count // TILE))  # tiles of a row
        shape, device = (len(vectors) * width, TILE), vectors.device
        scores = vectors.new_full(shape, -torch.inf)
        numbers = torch.zeros(shape[0], dtype=torch.long, device=device)  # the tile in each place
        row_starts = torch.arange(len(vectors), device=device)[:, None] * width
        begins = (ends - tiles.counts[groups] + row_starts).flatten()  # the place of each visit's first tile
        visits = groups.flatten().argsort()
        for group, own in enumerate(visits.split(groups.flatten().bincount(minlength=len(tiles.counts)).tolist())):
            if len(own):
                rows = vectors.index_select(0, own.div(probe, rounding_mode="floor"))
                found = product(rows, tiles.centroids[group], tiles.biases[group])
                places = (begins[own][:, None] + tiles.columns[: found.size(1) // TILE]).flatten()
                scores.index_copy_(0, places, found.reshape(-1, TILE))
                numbers.index_copy_(0, places, tiles.numbers[group].repeat(len(own)))
        scores = scores.view(len(vectors), -1)
        columns, chosen = _largest(scores, count)
        tile = numbers.view(len(vectors), width).gather(1, columns.div(TILE, rounding_mode="floor"))
        return tiles.members[tile, columns % TILE].masked_fill(chosen == -torch.inf, -1), chosen

    def _nearest(self, vectors: Tensor, probe: int) -> Tensor:
        probe = min(probe, len(self._centres))
        groups = nearest_centroids(vectors, self._centres, self._metric, probe).flatten()  # (n * probe,)
        visits = groups.argsort().div_(probe, rounding_mode="floor")  # vectors, by the group that they visit
        best = vectors.new_full((len(vectors),), -torch.inf)
        nearest = torch.full((len(vectors),), -1, device=vectors.device)
        counts = groups.bincount(minlength=len(self._centres)).tolist()
        for group, rows in enumerate(visits.split(counts)):
            if len(rows):
                scores = product(vectors.index_select(0, rows), self._centroids[group], self._biases[group])
                scores, places = scores.max(dim=1)
                better = scores > best[rows]
                rows = rows[better]
                best[rows], nearest[rows] = scores[better], self._members[group][places[better]]
        return nearest


class _Tiles:
    """The centroids of each group in tiles of one width, so that scores of several groups fit side by side."""

    def __init__(self, members: list[Tensor], centroids: list[Tensor], biases: list[Tensor]):
        pad = [-len(part) % TILE for part in members]
        device = members[0].device
        self.members = torch.cat([F.pad(part, (0, p), value=-1) for part, p in zip(members, pad)]).view(-1, TILE)
        self.centroids = [F.pad(part, (0, 0, 0, p)) for part, p in zip(centroids, pad)]
        self.biases = [F.pad(part, (0, p), value=-torch.inf) for part, p in zip(biases, pad)]
        self.counts = torch.tensor([len(part) // TILE for part in self.biases], device=device)
        self.columns = torch.arange(int(self.counts.max()), device=device)
        firsts = (self.counts.cumsum(0) - self.counts).tolist()
        self.numbers = [torch.arange(f, f + c, device=device) for f, c in zip(firsts, self.counts.tolist())]


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The columns of the ``count`` largest of each row, largest first, and the scores: (n, m) -> (n, count) each."""
    if scores.device.type != "cpu":
        found = scores.topk(count, dim=1)
        return found.indices, found.values
    # NumPy's partition is vectorised, and several times as fast as torch's topk.
    columns = torch.from_numpy(np.argpartition((-scores).numpy(), count - 1, axis=1)[:, :count].copy())
    chosen, order = scores.gather(1, columns).sort(dim=1, descending=True)
    return columns.gather(1, order), chosen


def train_centroids(
    sample: np.ndarray, count: int, metric: str, seed: int, device: torch.device | str = "cpu"
) -> np.ndarray:
    """Lloyd's k-means: sample (n, dim) -> centroids (count, dim) float32; of unit length for inner products."""
    vectors = torch.from_numpy(np.ascontiguousarray(sample, np.float32)).to(device)
    generator = torch.Generator().manual_seed(seed)
    rounds = each(range(ROUNDS), "clustering", ROUNDS, " rounds")
    return _kmeans(vectors, count, metric, generator, rounds).cpu().numpy()


def kmeans(vectors: Tensor, count: int, metric: str, seed: int) -> Tensor:
    """As ``train_centroids``, of few vectors, with nothing shown: (n, dim) -> (count, dim)."""
    return _kmeans(vectors, count, metric, torch.Generator().manual_seed(seed), range(ROUNDS))


class Sample(Protocol):
    """Vectors that may be more than memory holds."""

    def __len__(self) -> int: ...

    def blocks(self) -> Iterator[Tensor]:
        """All of them in order, some at a time: (rows, dim) float32."""


def train_two_level_centroids(
    sample: Sample, groups: int, count: int, metric: str, seed: int, device: torch.device | str = "cpu"
) -> np.ndarray:
    """As ``train_centroids``, by k-means inside each of ``groups`` groups: many times as fast and nearly as good.

    A group gets centroids in proportion to its vectors. The vectors of some groups at a time are in memory; which
    vector is in which group is known on the CPU, whatever the device.
    """
    generator = torch.Generator().manual_seed(seed)
    stride = max(1, len(sample) // (groups * POINTS_PER_GROUP))
    some = torch.cat([block[::stride].clone() for block in sample.blocks()]).to(device)  # a view would keep the block
    centres = _kmeans(some, groups, metric, generator, each(range(ROUNDS), "grouping", ROUNDS, " rounds"))
    del some
    parts = [nearest_centroids(block.to(device), centres, metric)[:, 0].cpu() for block in sample.blocks()]
    group = torch.cat(parts)
    sizes = group.bincount(minlength=groups)
    shares = (sizes.cumsum(0) * count // len(sample)).diff(prepend=torch.zeros(1, dtype=torch.long))
    vectors_at_once = max(int(sizes.max()), FLOATS_AT_ONCE // centres.size(1))
    passes = (sizes.cumsum(0) - 1).clamp(min=0) // vectors_at_once  # of each group: the pass in which it is in memory

    def cluster(number: int, vectors: Tensor) -> Tensor:
        own = torch.Generator().manual_seed(seed * groups + number)
        return _kmeans(vectors, int(shares[number]), metric, own, range(ROUNDS))

    found: list[Tensor] = []
    turns = passes.unique().tolist()
    for turn in each(turns, "clustering", len(turns), " passes"):
        members = (passes == turn)[group]
        vectors = _taken(sample, members, centres.size(1))
        order = group[members].argsort(stable=True)
        numbers = (passes == turn).nonzero()[:, 0].tolist()
        rows = dict(zip(numbers, order.split(sizes[numbers].tolist())))
        # A group with next to no vectors may get no centroids.
        own = [number for number in numbers if shares[number]]
        if torch.device(device).type == "cpu":
            found += for_each(lambda n, v=vectors, r=rows: cluster(n, v[r[n]]), [(number,) for number in own])
        else:
            found += [cluster(number, vectors[rows[number]].to(device)).cpu() for number in own]
        del vectors  # before those of the next pass are there
    return torch.cat(found).numpy()


def _taken(sample: Sample, members: Tensor, dim: int) -> Tensor:
    """Those vectors of a sample that are wanted, (n,) bool: (m, dim)."""
    taken, first, place = torch.empty((int(members.sum()), dim)), 0, 0
    for block in sample.blocks():
        own = block[members[first : first + len(block)]]
        taken[place : place + len(own)] = own
        first, place = first + len(block), place + len(own)
    return taken


def _kmeans(
    vectors: Tensor, count: int, metric: str, generator: torch.Generator, rounds: Iterable[int]
) -> Tensor:
    """vectors (n, dim) -> centroids (count, dim)."""
    # Random numbers come from the CPU, so that every device begins with the same vectors.
    chosen = torch.randperm(len(vectors), generator=generator)[:count]
    centroids = vectors[chosen.to(vectors.device)].clone()
    for _ in rounds:
        nearest = nearest_centroids(vectors, centroids, metric)[:, 0]
        sizes = torch.zeros(count, dtype=torch.long, device=vectors.device)
        sizes.index_add_(0, nearest, torch.ones_like(nearest))
        centroids = torch.zeros_like(centroids).index_add_(0, nearest, vectors)
        centroids /= sizes.clamp(min=1)[:, None]
        _refill_empty(centroids, sizes, vectors, nearest, generator)
        if metric == "ip":
            centroids = torch.nn.functional.normalize(centroids)
    return centroids


def _refill_empty(
    centroids: Tensor, sizes: Tensor, vectors: Tensor, nearest: Tensor, generator: torch.Generator
) -> None:
    """Give an empty cluster a vector of one of the largest clusters to start from."""
    empty = (sizes == 0).nonzero()[:, 0]
    if len(empty):
        crowded = sizes[nearest].double()[: 1 << 24].cpu()
        chosen = torch.multinomial(crowded, len(empty), generator=generator)
        centroids[empty] = vectors[chosen.to(vectors.device)]
