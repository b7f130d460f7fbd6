"""Distances between some queries and a block of keys, as one matrix product; and one by one, to the last digit.

Here is decided which sign a distance has: the smaller a squared distance, but the larger an inner product, the nearer.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..products import product


def similarity_scale(metric: str, temperature: float) -> float:
    """What a distance is multiplied by before the softmax: -1/T for squared L2 distances, 1/T for inner products."""
    return (1.0 if metric == "ip" else -1.0) / temperature


def block_distances(
    queries: Tensor, keys: Tensor, metric: str, scale: float = 1.0, precision: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Squared L2 distances or inner products, times ``scale``, in two summands.

    |q - k|^2 = |q|^2 + |k|^2 - 2 q.k cancels badly when the norms are large and the distance is small. So for L2 both
    should be relative to a point near the keys.

    Args:
        queries: (r, dim) float32
        keys: (m, dim) float32
        precision: of the factors of an L2 distance's product. Half precision is for GPUs and models that have it; norms
            and sums stay float32. (Inner products may be larger than half precision can say.)

    Returns:
        (r, m) and (r,): what depends on the key, and the rest, the same for all keys of a query. Adding them up would
        be one more pass over the larger, and nobody needs the sum of all.
    """
    if metric == "ip":
        return inner_products(queries, keys, scale)
    if precision == torch.float32:
        return l2_distances(queries, keys, scale)
    norms = _square_norms(keys) * scale
    partial = _float_product((queries * (-2.0 * scale)).to(precision), keys.to(precision)).add_(norms)
    return partial, _square_norms(queries) * scale


def _square_norms(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=1).square_()


def inner_products(queries: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What ``block_distances`` returns for inner products."""
    return product(queries * scale, keys), torch.zeros_like(queries[:, 0])


def l2_distances(queries: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What ``block_distances`` returns for squared L2 distances in single precision."""
    norms = torch.linalg.vector_norm(keys, dim=1).square_() * scale
    partial = product(queries * (-2.0 * scale), keys, norms)
    return partial, torch.linalg.vector_norm(queries, dim=1).square_() * scale


def _float_product(queries: Tensor, keys: Tensor) -> Tensor:
    """The product of factors in half precision, in single precision: (r, dim), (m, dim) -> (r, m) float32.

    GPUs add up in single precision anyway; a result in half precision would throw away half of the digits.
    """
    if queries.device.type == "cuda" and hasattr(torch.ops.aten.mm, "dtype"):  # from torch 2.8 on
        return torch.ops.aten.mm.dtype(queries, keys.T, torch.float32)
    return torch.mm(queries.float(), keys.float().T)


# Vectors of neighbours that are in memory at once, in floats: 64 queries x 1024 neighbours x 1024 floats are 256 MiB.
MAX_FLOATS = 1 << 26


def neighbor_distances(
    queries: np.ndarray, ids: np.ndarray, vectors: Callable[[np.ndarray], np.ndarray], metric: str
) -> np.ndarray:
    """Distances of each query's own neighbours: queries (n, dim), ids (n, k) -> (n, k), without cancellation.

    Args:
        vectors: ids (m,) -> keys (m, dim). The distance of a missing neighbour (id -1) means nothing.
    """
    distances = np.empty(ids.shape, np.float32)
    step = max(1, MAX_FLOATS // (ids.shape[1] * queries.shape[1]))
    for start in range(0, len(queries), step):
        rows = slice(start, start + step)
        distinct, place = np.unique(np.maximum(ids[rows], 0), return_inverse=True)  # queries share neighbours
        keys = np.asarray(vectors(distinct), np.float32)[place.reshape(ids[rows].shape)]  # (rows, k, dim)
        if metric == "ip":
            distances[rows] = np.einsum("nkd,nd->nk", keys, queries[rows])
        else:
            keys -= queries[rows, None, :]
            distances[rows] = np.einsum("nkd,nkd->nk", keys, keys)
    return distances
