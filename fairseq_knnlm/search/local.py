"""A FAISS index in this process, and exact (or the index's own) distances for neighbours found otherwise."""

from collections.abc import Callable

import faiss
import numpy as np

from ..index import extract_ivf


class FaissSearch:
    """Whatever the index returns, with the index's own distances."""

    preferred_queries = 8192  # FastScan's reservoirs like batches of 4 to 16 thousand

    def __init__(self, index: faiss.Index, nprobe: int):
        self.index = index
        ivf = extract_ivf(index)
        if ivf is not None:
            ivf.nprobe = min(nprobe, ivf.nlist)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        return self.index.search(np.ascontiguousarray(queries, np.float32), min(k, self.index.ntotal))


class Rescored:
    """The neighbours of another engine, with distances computed anew from ``vectors(ids) -> (n, dim)``."""

    # Queries whose neighbours' vectors are in memory at once: 64 queries x 1024 neighbours x 1024 floats are 256 MiB.
    _MAX_FLOATS = 1 << 26

    def __init__(self, neighbors, vectors: Callable[[np.ndarray], np.ndarray], metric: str):
        self.neighbors, self.vectors, self.metric = neighbors, vectors, metric
        self.preferred_queries = neighbors.preferred_queries

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        _, ids = self.neighbors.search(queries, k)
        distances = np.empty(ids.shape, np.float32)
        step = max(1, self._MAX_FLOATS // (ids.shape[1] * queries.shape[1]))
        for start in range(0, len(queries), step):
            part = slice(start, start + step)
            distances[part] = self._distances(queries[part], ids[part])
        return distances, ids

    def _distances(self, queries: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """queries (n, dim), ids (n, k) -> (n, k). The distance of a missing neighbour means nothing."""
        distinct, place = np.unique(np.maximum(ids, 0), return_inverse=True)  # neighbours are shared between queries
        vectors = np.asarray(self.vectors(distinct), np.float32)[place.reshape(ids.shape)]  # (n, k, dim)
        if self.metric == "ip":
            return np.einsum("nkd,nd->nk", vectors, queries)
        vectors -= queries[:, None, :]
        return np.einsum("nkd,nkd->nk", vectors, vectors)
