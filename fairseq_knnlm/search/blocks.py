"""Distances between some queries and a block of keys, as one matrix product."""

import torch
from torch import Tensor


def block_distances(queries: Tensor, keys: Tensor, metric: str, origin: Tensor | None = None) -> Tensor:
    """queries (r, dim), keys (m, dim), both float32 -> (r, m): squared L2 distances or inner products.

    |q - k|^2 = |q|^2 + |k|^2 - 2 q.k cancels badly when the norms are large and the distance is small. An origin (dim,)
    near the keys keeps the norms small; keys and queries are taken relative to it.
    """
    if metric == "ip":
        return queries @ keys.T
    if origin is not None:
        queries, keys = queries - origin, keys - origin
    distances = torch.addmm(_square_norms(keys), queries, keys.T, alpha=-2.0)
    return distances.add_(_square_norms(queries)[:, None]).clamp_(min=0.0)


def _square_norms(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=1).square_()
