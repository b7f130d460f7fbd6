"""A FAISS index in this process, and exact (or the index's own) distances for neighbours found otherwise."""

from collections.abc import Callable, Iterator

import faiss
import numpy as np

from ..index.info import extract_ivf
from .distances import neighbor_distances
from .engine import QUERIES_PER_PART, Search


def with_nprobe(index: faiss.Index, nprobe: int) -> faiss.Index:
    """The index, told to visit so many lists if it has any."""
    ivf = extract_ivf(index)
    if ivf is not None:
        ivf.nprobe = min(nprobe, ivf.nlist)
    return index


class FaissSearch(Search):
    """Whatever the index returns, with the index's own distances."""

    preferred_queries = 8192  # FastScan's reservoirs like batches of 4 to 16 thousand

    def __init__(self, index: faiss.Index, nprobe: int):
        self.index = with_nprobe(index, nprobe)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        return self.index.search(np.ascontiguousarray(queries, np.float32), min(k, self.index.ntotal))


class RescoredSearch(Search):
    """The neighbours of another engine, with distances computed again from ``vectors(ids) -> (n, dim)``."""

    def __init__(self, neighbors: Search, vectors: Callable[[np.ndarray], np.ndarray], metric: str):
        self.neighbors, self.vectors, self.metric = neighbors, vectors, metric
        self.preferred_queries = neighbors.preferred_queries

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Best first, by the distances computed here."""
        distances, ids = self._rescore(queries, k)
        sign = -1.0 if self.metric == "ip" else 1.0
        order = np.argsort(np.where(ids < 0, np.inf, sign * distances), axis=1, kind="stable")
        return np.take_along_axis(distances, order, axis=1), np.take_along_axis(ids, order, axis=1)

    def search_in_parts(self, queries: np.ndarray, k: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """In the order of the other engine: its first k' neighbours are what it finds for k'."""
        for start in range(0, len(queries), QUERIES_PER_PART):
            yield self._rescore(queries[start : start + QUERIES_PER_PART], k)

    def _rescore(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        _, ids = self.neighbors.search(queries, k)
        return neighbor_distances(queries, ids, self.vectors, self.metric), ids
