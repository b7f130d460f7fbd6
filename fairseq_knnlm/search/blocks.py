"""Distances between some queries and a block of keys, as one matrix product."""

import torch
from torch import Tensor


def block_distances(
    queries: Tensor, keys: Tensor, metric: str, origin: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Squared L2 distances or inner products, times ``scale``, in two summands.

    Args:
        queries: (r, dim) float32
        keys: (m, dim) float32
        origin: (dim,) near the keys. |q - k|^2 = |q|^2 + |k|^2 - 2 q.k cancels badly when the norms are large and the
            distance is small; taken relative to a point near the keys, they are small.

    Returns:
        (r, m) and (r,): what depends on the key, and the rest, the same for all keys of a query. Adding them up would
        be one more pass over the larger, and nobody needs the sum of all.
    """
    if metric == "ip":
        return torch.mm(queries * scale, keys.T), queries.new_zeros(len(queries))
    if origin is not None:
        queries, keys = queries - origin, keys - origin
    partial = torch.addmm(_square_norms(keys) * scale, queries, keys.T, alpha=-2.0 * scale)
    return partial, _square_norms(queries) * scale


def _square_norms(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=1).square_()
