"""A FAISS index in this process, and exact (or the index's own) distances for neighbours found otherwise."""

from collections.abc import Callable

import faiss
import numpy as np

from ..index import extract_ivf
from .blocks import neighbor_distances
from .protocol import Search


class FaissSearch(Search):
    """Whatever the index returns, with the index's own distances."""

    preferred_queries = 8192  # FastScan's reservoirs like batches of 4 to 16 thousand

    def __init__(self, index: faiss.Index, nprobe: int):
        self.index = index
        ivf = extract_ivf(index)
        if ivf is not None:
            ivf.nprobe = min(nprobe, ivf.nlist)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        return self.index.search(np.ascontiguousarray(queries, np.float32), min(k, self.index.ntotal))


class Rescored(Search):
    """The neighbours of another engine, with distances computed anew from ``vectors(ids) -> (n, dim)``."""

    def __init__(self, neighbors: Search, vectors: Callable[[np.ndarray], np.ndarray], metric: str):
        self.neighbors, self.vectors, self.metric = neighbors, vectors, metric
        self.preferred_queries = neighbors.preferred_queries

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        _, ids = self.neighbors.search(queries, k)
        return neighbor_distances(queries, ids, self.vectors, self.metric), ids
