"""List-major search in an IVF index: each visited list is read once for all queries that visit it."""

from collections.abc import Callable, Iterator

import faiss
import numpy as np
import torch
from torch import Tensor

from ..datastore import Datastore
from ..errors import KnnlmError
from ..index.info import inverted_lists, split_transform, stores_exact_keys
from ..index.kmeans import nearest_centroids
from ..parallel import for_each
from .distances import block_distances, similarity_scale
from .engine import Search
from .target_mass import TargetMass
from .top_k import MOST_IDS, SAMPLE_STRIDE, NearestCandidates, Thresholds, capacity

QUERY_BYTES = 1 << 28  # for the queries that are searched at once
SEARCH_BYTES = 1 << 29  # for candidates, in search
FEW_QUERIES = 32
LONG_SEARCH = 8192  # queries, from which on there is a progress bar
PARALLEL_OVER_LISTS = 1  # FAISS's parallel_mode; by default it takes one thread per query


class ListSearch(Search):
    """Exact distances to the entries of the visited lists: the k nearest, or all of them."""

    def __init__(self, index: faiss.Index, datastore: Datastore, metric: str, nprobe: int):
        self.datastore, self.metric = datastore, metric
        self.preferred_queries = QUERY_BYTES // (4 * datastore.dim)  # more queries share the reading of a list
        self._index = index  # owns the memory that self.ivf points to
        self._transform, ivf = split_transform(index)
        if ivf is None:
            raise KnnlmError(f"an index of type {type(index).__name__} has no inverted lists; use --knn-index auto")
        self.ivf = ivf
        self.nprobe = min(nprobe, self.ivf.nlist)
        self._holds_keys = stores_exact_keys(index, datastore)
        self._list_keys = _key_reader(self.ivf, datastore)
        flat = isinstance(faiss.downcast_index(self.ivf.quantizer), faiss.IndexFlat)
        self._centroids = torch.from_numpy(self.ivf.quantizer.reconstruct_n(0, self.ivf.nlist)) if flat else None

    def target_mass(
        self, queries: np.ndarray, targets: np.ndarray, temperatures: list[float]
    ) -> tuple[np.ndarray, np.ndarray]:
        mass = TargetMass(targets, [temperatures[0] / temperature for temperature in temperatures])
        values_of = self.datastore.values_of
        self._visit(
            queries,
            self._nearest_lists(queries),
            lambda rows, ids, similarities, constants: mass.add(rows, similarities, constants, values_of(ids)),
            similarity_scale(self.metric, temperatures[0]),
            arrange=lambda ids: values_of(ids).argsort(),
        )
        return mass.result()

    def visited(self, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Everything that one query (1, dim) visits, in any order: distances (1, m), ids (1, m)."""
        if self._holds_keys:
            self.ivf.nprobe, self.ivf.parallel_mode = self.nprobe, PARALLEL_OVER_LISTS
            largest = float(np.finfo(np.float32).max)
            everything = -largest if self.metric == "ip" else largest
            _, distances, ids = self._index.range_search(np.ascontiguousarray(query, np.float32), everything)
            return distances[None], ids[None]
        found: list[tuple[np.ndarray, np.ndarray]] = []

        def collect(_: Tensor, ids: np.ndarray, distances: Tensor, constants: Tensor) -> None:
            found.append(((distances + constants[:, None]).numpy(), ids[None]))

        self._visit(query, self._nearest_lists(query), collect, 1.0)
        if not found:  # every visited list is empty
            return np.empty((1, 0), np.float32), np.empty((1, 0), np.int64)
        distances, ids = (np.concatenate(parts, axis=1) for parts in zip(*found))
        return distances, ids

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest of all entries of the visited lists. Needs an index that stores the keys themselves."""
        distances, ids = zip(*self.search_in_parts(queries, k))
        return np.concatenate(distances), np.concatenate(ids)

    def search_in_parts(self, queries: np.ndarray, k: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        k = min(k, len(self.datastore))
        if len(queries) < FEW_QUERIES or len(self.datastore) > MOST_IDS:  # nothing to share, or no room for the ids
            yield self._search_plainly(queries, k)
            return
        lists = self._nearest_lists(queries)
        sizes = np.array([*(self.ivf.get_list_size(number) for number in range(self.ivf.nlist)), 0])
        sampled = -(-sizes // SAMPLE_STRIDE)  # the last number is for list -1, which means none
        max_samples = int(sampled[lists].sum(axis=1).max())
        most = max(1, SEARCH_BYTES // max(4 * max_samples, 8 * capacity(k)))
        passes = -(-len(queries) // most)
        step = -(-len(queries) // passes)  # evenly, since a small pass reads as much as a large one
        for start in range(0, len(queries), step):
            rows = slice(start, start + step)
            yield from self._search(queries[rows], lists[rows], max_samples, k)

    def _search_plainly(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        self.ivf.nprobe, self.ivf.parallel_mode = self.nprobe, PARALLEL_OVER_LISTS
        return self._index.search(np.ascontiguousarray(queries, np.float32), k)

    def _search(
        self, queries: np.ndarray, lists: np.ndarray, max_samples: int, k: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """queries (n, dim), the lists that each visits (n, nprobe) -> distances (rows, k), ids (rows, k)."""
        sign = -1.0 if self.metric == "ip" else 1.0  # the smaller the better, whatever the metric
        nearest = NearestCandidates(self._thresholds(queries, lists, max_samples, k, sign), k)
        self._visit(
            queries,
            lists,
            lambda rows, ids, distances, constants: nearest.add(rows, distances, constants, ids),
            sign,
        )
        start = 0
        for found_distances, found_ids, right in nearest.parts():
            distances, ids = found_distances.mul_(sign).numpy(), found_ids.numpy()
            wrong = np.flatnonzero(~right.numpy())
            if len(wrong):
                distances[wrong], ids[wrong] = self._search_plainly(queries[start + wrong], k)
            start += len(ids)
            yield distances, ids

    def _thresholds(
        self, queries: np.ndarray, lists: np.ndarray, max_samples: int, k: int, sign: float
    ) -> Tensor:
        """For each query a distance below which a little more than k entries lie, (n,)."""
        thresholds = Thresholds(len(queries), max_samples, k)
        self._visit(
            queries,
            lists,
            lambda rows, _, distances, constants: thresholds.add(rows, distances, constants),
            sign,
            arrange=lambda ids: slice(None, None, SAMPLE_STRIDE),
        )
        return thresholds.result()

    def _nearest_lists(self, queries: np.ndarray) -> np.ndarray:
        """The lists that each query visits, (n, nprobe)."""
        queries = self._transform(queries)
        if self._centroids is None:
            return self.ivf.quantizer.search(queries, self.nprobe)[1]
        return nearest_centroids(torch.from_numpy(queries), self._centroids, self.metric, self.nprobe).numpy()

    def _visit(
        self,
        queries: np.ndarray,
        lists: np.ndarray,
        consume: Callable[[Tensor, np.ndarray, Tensor, Tensor], None],
        scale: float,
        arrange: Callable[[np.ndarray], np.ndarray | slice] = lambda ids: slice(None),
    ) -> None:
        """For each visited list: consume(queries (r,) that visit it, its entries (m,), their distances).

        The distances are multiplied by ``scale`` and come in two summands, (r, m) and (r,).

        Args:
            arrange: which of a list's entries, in which order
        """
        all_queries = torch.from_numpy(np.ascontiguousarray(queries, np.float32))

        def visit(number: int, rows: np.ndarray) -> None:
            ids = faiss.rev_swig_ptr(inverted_lists(self.ivf).get_ids(number), self.ivf.get_list_size(number))
            chosen = arrange(ids)
            ids = ids[chosen]
            keys = torch.from_numpy(self._list_keys(number, ids, chosen)).float()
            own = torch.from_numpy(rows)
            consume(own, ids, *block_distances(all_queries.index_select(0, own), keys, self.metric, keys[0], scale))

        # NumPy sorts 16 bits by radix, ten times as fast as more; -1 (no list) becomes the last number.
        nlist = self.ivf.nlist
        flat = np.where(lists < 0, nlist, lists).ravel().astype(np.min_scalar_type(nlist))
        order = np.argsort(flat, kind="stable")
        ends = np.bincount(flat, minlength=nlist + 1).cumsum()
        visits = np.split(order // lists.shape[1], ends[:-1])
        jobs = [(n, visits[n]) for n in range(nlist) if len(visits[n]) and self.ivf.get_list_size(n)]
        for_each(visit, jobs, "searching" if len(queries) >= LONG_SEARCH else None)


def _key_reader(ivf: faiss.IndexIVF, datastore: Datastore) -> Callable[..., np.ndarray]:
    """A function (list, ids (m,), which of its entries these are) -> keys (m, dim)."""
    if ivf.d != datastore.dim or not stores_exact_keys(ivf, datastore):
        return lambda number, ids, chosen: datastore.gather_keys(ids)
    dtype = np.float32 if isinstance(ivf, faiss.IndexIVFFlat) else np.float16

    def read(number: int, ids: np.ndarray, chosen: np.ndarray | slice) -> np.ndarray:
        size = ivf.get_list_size(number)
        codes = faiss.rev_swig_ptr(inverted_lists(ivf).get_codes(number), size * ivf.code_size)
        return codes.view(dtype).reshape(size, -1)[chosen]

    return read
