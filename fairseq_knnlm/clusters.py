"""k-means and nearest centroids as matrix products in torch, several times as fast as the BLAS in FAISS's wheels."""

import numpy as np
import torch
from torch import Tensor
from tqdm import trange

ROWS = 1 << 14  # vectors compared with all centroids at once


def nearest_centroids(vectors: Tensor, centroids: Tensor, metric: str, count: int = 1) -> Tensor:
    """The ``count`` best centroids of each vector, best first: (n, dim), (c, dim) -> (n, count)."""
    # |v - c|^2 without |v|^2, which is the same for all centroids; for inner products the bias is zero
    bias = torch.zeros(len(centroids)) if metric == "ip" else (centroids * centroids).sum(dim=1).mul_(-0.5)
    parts = []
    for part in vectors.split(ROWS):
        scores = torch.addmm(bias, part.float(), centroids.T)
        parts.append(scores.argmax(dim=1, keepdim=True) if count == 1 else scores.topk(count, dim=1).indices)
    return torch.cat(parts)


def train_centroids(sample: np.ndarray, count: int, metric: str, seed: int, rounds: int = 10) -> np.ndarray:
    """Lloyd's k-means: sample (n, dim) -> centroids (count, dim) float32; of unit length for inner products."""
    vectors = torch.from_numpy(np.ascontiguousarray(sample, np.float32))
    generator = torch.Generator().manual_seed(seed)
    centroids = vectors[torch.randperm(len(vectors), generator=generator)[:count]].clone()
    for _ in trange(rounds, desc="clustering", unit="round"):
        nearest = nearest_centroids(vectors, centroids, metric)[:, 0]
        sizes = torch.bincount(nearest, minlength=count)
        centroids = torch.zeros_like(centroids).index_add_(0, nearest, vectors)
        centroids /= sizes.clamp(min=1)[:, None]
        _refill_empty(centroids, sizes, vectors, nearest, generator)
        if metric == "ip":
            centroids = torch.nn.functional.normalize(centroids)
    return centroids.numpy()


def _refill_empty(centroids: Tensor, sizes: Tensor, vectors: Tensor, nearest: Tensor, generator) -> None:
    """Give an empty cluster a vector of one of the largest clusters to start from."""
    empty = (sizes == 0).nonzero()[:, 0]
    if len(empty):
        crowded = sizes[nearest].double()
        chosen = torch.multinomial(crowded[: 1 << 24], len(empty), generator=generator)
        centroids[empty] = vectors[chosen]
