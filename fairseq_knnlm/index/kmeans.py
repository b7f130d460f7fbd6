"""k-means and nearest centroids as matrix products in torch, several times as fast as the BLAS in FAISS's wheels."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm, trange

from ..parallel import for_each

ROWS = 1 << 14  # vectors compared with all centroids at once
ROUNDS = 10  # of k-means


def nearest_centroids(vectors: Tensor, centroids: Tensor, metric: str, count: int = 1) -> Tensor:
    """The ``count`` best centroids of each vector, best first: (n, dim), (c, dim) -> (n, count)."""
    bias = _bias(centroids, metric)
    parts = []
    for part in vectors.split(ROWS):
        scores = torch.addmm(bias, part.float(), centroids.T)
        parts.append(scores.argmax(dim=1, keepdim=True) if count == 1 else scores.topk(count, dim=1).indices)
    return torch.cat(parts)


def _bias(centroids: Tensor, metric: str) -> Tensor:
    """What v.c lacks to rank centroids: -|v - c|^2 / 2 without |v|^2, which all have in common; or nothing."""
    return torch.zeros(len(centroids)) if metric == "ip" else (centroids * centroids).sum(dim=1).mul_(-0.5)


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

    def _nearest(self, vectors: Tensor, probe: int) -> Tensor:
        probe = min(probe, len(self._centres))
        groups = nearest_centroids(vectors, self._centres, self._metric, probe).flatten()  # (n * probe,)
        visits = groups.argsort().div_(probe, rounding_mode="floor")  # vectors, by the group that they visit
        best = torch.full((len(vectors),), -torch.inf)
        nearest = torch.full((len(vectors),), -1)
        counts = groups.bincount(minlength=len(self._centres)).tolist()
        for group, rows in enumerate(visits.split(counts)):
            if len(rows):
                scores = torch.addmm(self._biases[group], vectors.index_select(0, rows), self._centroids[group].T)
                scores, places = scores.max(dim=1)
                better = scores > best[rows]
                rows = rows[better]
                best[rows], nearest[rows] = scores[better], self._members[group][places[better]]
        return nearest


def train_centroids(sample: np.ndarray, count: int, metric: str, seed: int) -> np.ndarray:
    """Lloyd's k-means: sample (n, dim) -> centroids (count, dim) float32; of unit length for inner products."""
    vectors = torch.from_numpy(np.ascontiguousarray(sample, np.float32))
    generator = torch.Generator().manual_seed(seed)
    return _kmeans(vectors, count, metric, generator, trange(ROUNDS, desc="clustering", unit="round")).numpy()


def train_two_level_centroids(
    sample: np.ndarray, groups: int, count: int, metric: str, seed: int
) -> np.ndarray:
    """As ``train_centroids``, by k-means inside each of ``groups`` groups: many times as fast and nearly as good.

    A group gets centroids in proportion to its vectors.
    """
    vectors = torch.from_numpy(np.ascontiguousarray(sample, np.float32))
    generator = torch.Generator().manual_seed(seed)
    group_centroids = _kmeans(vectors, groups, metric, generator, trange(ROUNDS, desc="grouping", unit="round"))
    group = nearest_centroids(vectors, group_centroids, metric)[:, 0]
    ends = group.bincount(minlength=groups).cumsum(0)
    members = group.argsort(stable=True).tensor_split(ends[:-1])
    shares = (ends * count // len(vectors)).diff(prepend=torch.zeros(1, dtype=torch.long))
    parts = []
    for rows, share in zip(tqdm(members, desc="clustering", unit="group"), shares.tolist()):
        if share:  # a group with next to no vectors may get none
            parts.append(_kmeans(vectors[rows], share, metric, generator, range(ROUNDS)))
    return torch.cat(parts).numpy()


def _kmeans(
    vectors: Tensor, count: int, metric: str, generator: torch.Generator, rounds: Iterable[int]
) -> Tensor:
    """vectors (n, dim) -> centroids (count, dim)."""
    centroids = vectors[torch.randperm(len(vectors), generator=generator)[:count]].clone()
    for _ in rounds:
        nearest = nearest_centroids(vectors, centroids, metric)[:, 0]
        sizes = torch.bincount(nearest, minlength=count)
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
        crowded = sizes[nearest].double()
        chosen = torch.multinomial(crowded[: 1 << 24], len(empty), generator=generator)
        centroids[empty] = vectors[chosen]
