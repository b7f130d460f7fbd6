"""The nearest entries of a datastore for a query, with their shares: for looking at."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .datastore_memory import DatastoreMemory
from .probabilities import neighbor_log_weights, similarities


@dataclass
class Neighbor:
    """An entry that a query found."""

    entry: int  # its number in the datastore
    token: int  # its value: the token that followed
    distance: float  # squared L2 distance or inner product
    share: float  # of p_kNN


def nearest_neighbors(memory: DatastoreMemory, queries: Tensor, count: int) -> list[list[Neighbor]]:
    """For each query the ``count`` entries with the largest shares, largest first: queries (n, dim) -> n lists."""
    vectors = memory.project(queries)
    if memory.k is None:
        found = [memory.engine.visited(vector[None]) for vector in vectors]
    else:
        distances, ids = memory.engine.search(vectors, memory.k)
        found = [(d[None], i[None]) for d, i in zip(distances, ids)]
    return [_largest(memory, distances[0], ids[0], count) for distances, ids in found]


def _largest(memory: DatastoreMemory, distances: np.ndarray, ids: np.ndarray, count: int) -> list[Neighbor]:
    """distances (m,), ids (m,)."""
    near = similarities(torch.from_numpy(distances)[None], torch.from_numpy(ids)[None], memory.metric)
    shares = neighbor_log_weights(near, 1 / memory.temperature)[0].exp()
    best = [place for place in shares.topk(min(count, len(shares))).indices.tolist() if ids[place] >= 0]
    tokens = memory.datastore.values_of(ids[best])
    return [
        Neighbor(int(ids[place]), int(token), float(distances[place]), float(shares[place]))
        for place, token in zip(best, tokens)
    ]
