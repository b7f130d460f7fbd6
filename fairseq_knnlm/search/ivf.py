"""List-major search in an IVF index: each visited cluster is read once for all queries that visit it."""

from collections.abc import Callable, Iterator

import faiss
import numpy as np
import torch
from torch import Tensor

from ..clusters import nearest_centroids
from ..datastore import Datastore
from ..index import extract_ivf
from ..probs import similarity_scale
from ..threads import for_each
from .blocks import block_distances
from .mass import TargetMass
from .nearest import MOST_IDS, SAMPLE_STRIDE, NearestCandidates, Thresholds, capacity
from .protocol import MassSearch, Search

QUERY_BYTES = 1 << 28  # for the queries that are searched at once
SEARCH_BYTES = 1 << 29  # for candidates, in search
FEW_QUERIES = 32
LONG_SEARCH = 8192  # queries, from which on there is a progress bar
PARALLEL_OVER_CLUSTERS = 1  # FAISS's parallel_mode; by default it takes one thread a query


class ClusterSearch(Search, MassSearch):
    """Exact distances to the entries of the visited clusters: the k nearest, or all of them."""

    def __init__(self, index: faiss.Index, datastore: Datastore, metric: str, nprobe: int):
        self.datastore, self.metric = datastore, metric
        self.preferred_queries = QUERY_BYTES // (4 * datastore.dim)  # more queries share the reading of a cluster
        self._index = index  # owns the memory that self.ivf points to
        self._transform, self.ivf = _split_transform(index)
        self.nprobe = min(nprobe, self.ivf.nlist)
        self._holds_keys = stores_exact_keys(index, datastore)
        self._cluster_keys = _key_reader(self.ivf, datastore)
        flat = isinstance(faiss.downcast_index(self.ivf.quantizer), faiss.IndexFlat)
        self._centroids = torch.from_numpy(self.ivf.quantizer.reconstruct_n(0, self.ivf.nlist)) if flat else None

    def target_mass(self, queries: np.ndarray, targets: np.ndarray, temperatures: list[float]):
        mass = TargetMass(targets, [temperatures[0] / temperature for temperature in temperatures])
        values = self.datastore.values
        self._visit(
            queries,
            self._clusters(queries),
            lambda rows, ids, similarities, constants: mass.add(rows, similarities, constants, values[ids]),
            similarity_scale(self.metric, temperatures[0]),
            arrange=lambda ids: values[ids].argsort(),
        )
        return mass.result()

    def visited(self, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Everything that one query (1, dim) visits, in any order: distances (1, m), ids (1, m)."""
        if self._holds_keys:
            self.ivf.nprobe, self.ivf.parallel_mode = self.nprobe, PARALLEL_OVER_CLUSTERS
            largest = np.finfo(np.float32).max
            everything = -largest if self.metric == "ip" else largest
            _, distances, ids = self._index.range_search(np.ascontiguousarray(query, np.float32), everything)
            return distances[None], ids[None]
        found: list[tuple[np.ndarray, np.ndarray]] = []

        def collect(_, ids: np.ndarray, distances: Tensor, constants: Tensor) -> None:
            found.append(((distances + constants[:, None]).numpy(), ids[None]))

        self._visit(query, self._clusters(query), collect, 1.0)
        distances, ids = (np.concatenate(parts, axis=1) for parts in zip(*found))
        return distances, ids

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest of all entries of the visited clusters. Needs an index that stores the keys themselves."""
        distances, ids = zip(*self.search_in_parts(queries, k))
        return np.concatenate(distances), np.concatenate(ids)

    def search_in_parts(self, queries: np.ndarray, k: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        k = min(k, len(self.datastore))
        if len(queries) < FEW_QUERIES or len(self.datastore) > MOST_IDS:  # nothing to share, or no room for the ids
            yield self._search_plainly(queries, k)
            return
        clusters = self._clusters(queries)
        sizes = np.array([*(self.ivf.get_list_size(number) for number in range(self.ivf.nlist)), 0])
        sampled = -(-sizes // SAMPLE_STRIDE)  # of cluster -1, none: the last number
        max_samples = int(sampled[clusters].sum(axis=1).max())
        most = max(1, SEARCH_BYTES // max(4 * max_samples, 8 * capacity(k)))
        passes = -(-len(queries) // most)
        step = -(-len(queries) // passes)  # evenly, since a small pass reads as much as a large one
        for start in range(0, len(queries), step):
            rows = slice(start, start + step)
            yield from self._search(queries[rows], clusters[rows], max_samples, k)

    def _search_plainly(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        self.ivf.nprobe, self.ivf.parallel_mode = self.nprobe, PARALLEL_OVER_CLUSTERS
        return self._index.search(np.ascontiguousarray(queries, np.float32), k)

    def _search(
        self, queries: np.ndarray, clusters: np.ndarray, max_samples: int, k: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """queries (n, dim), the clusters that each visits (n, nprobe) -> distances (rows, k), ids (rows, k)."""
        sign = -1.0 if self.metric == "ip" else 1.0  # the smaller the better, whatever the metric
        nearest = NearestCandidates(self._thresholds(queries, clusters, max_samples, k, sign), k)
        self._visit(
            queries,
            clusters,
            lambda rows, ids, distances, constants: nearest.add(rows, distances, constants, ids),
            sign,
        )
        start = 0
        for distances, ids, right in nearest.parts():
            distances, ids = distances.mul_(sign).numpy(), ids.numpy()
            wrong = np.flatnonzero(~right.numpy())
            if len(wrong):
                distances[wrong], ids[wrong] = self._search_plainly(queries[start + wrong], k)
            start += len(ids)
            yield distances, ids

    def _thresholds(
        self, queries: np.ndarray, clusters: np.ndarray, max_samples: int, k: int, sign: float
    ) -> Tensor:
        """A distance that a little more than k entries are below of, (n,)."""
        thresholds = Thresholds(len(queries), max_samples, k)
        self._visit(
            queries,
            clusters,
            lambda rows, _, distances, constants: thresholds.add(rows, distances, constants),
            sign,
            arrange=lambda ids: slice(None, None, SAMPLE_STRIDE),
        )
        return thresholds.result()

    def _clusters(self, queries: np.ndarray) -> np.ndarray:
        """The clusters that each query visits, (n, nprobe)."""
        queries = self._transform(queries)
        if self._centroids is None:
            return self.ivf.quantizer.search(queries, self.nprobe)[1]
        return nearest_centroids(torch.from_numpy(queries), self._centroids, self.metric, self.nprobe).numpy()

    def _visit(
        self,
        queries: np.ndarray,
        clusters: np.ndarray,
        consume: Callable[[Tensor, np.ndarray, Tensor, Tensor], None],
        scale: float,
        arrange: Callable[[np.ndarray], np.ndarray | slice] = lambda ids: slice(None),
    ) -> None:
        """For each visited cluster: consume(queries (r,) that visit it, its entries (m,), their distances).

        The distances are multiplied by ``scale`` and come in two summands, (r, m) and (r,).

        Args:
            arrange: which of a cluster's entries, in which order
        """
        all_queries = torch.from_numpy(np.ascontiguousarray(queries, np.float32))

        def visit(number: int, rows: np.ndarray) -> None:
            ids = faiss.rev_swig_ptr(self.ivf.invlists.get_ids(number), self.ivf.get_list_size(number))
            chosen = arrange(ids)
            ids = ids[chosen]
            keys = torch.from_numpy(self._cluster_keys(number, ids, chosen)).float()
            rows = torch.from_numpy(rows)
            consume(rows, ids, *block_distances(all_queries.index_select(0, rows), keys, self.metric, keys[0], scale))

        # NumPy sorts 16 bits by radix, ten times as fast as more; -1 (no cluster) becomes the last number.
        nlist = self.ivf.nlist
        flat = np.where(clusters < 0, nlist, clusters).ravel().astype(np.min_scalar_type(nlist))
        order = np.argsort(flat, kind="stable")
        ends = np.bincount(flat, minlength=nlist + 1).cumsum()
        visits = np.split(order // clusters.shape[1], ends[:-1])
        jobs = [(n, visits[n]) for n in range(nlist) if len(visits[n]) and self.ivf.get_list_size(n)]
        for_each(visit, jobs, "searching" if len(queries) >= LONG_SEARCH else None)


def _split_transform(index: faiss.Index) -> tuple[Callable[[np.ndarray], np.ndarray], faiss.IndexIVF]:
    """What is applied to queries before the clusters (PCA, OPQ), and the IVF index itself."""
    steps = []
    if isinstance(index, faiss.IndexPreTransform):
        steps = [faiss.downcast_VectorTransform(index.chain.at(i)) for i in range(index.chain.size())]

    def transform(queries: np.ndarray) -> np.ndarray:
        queries = np.ascontiguousarray(queries, np.float32)
        for step in steps:
            queries = step.apply(queries)
        return queries

    return transform, extract_ivf(index)


def stores_exact_keys(index: faiss.Index, datastore: Datastore) -> bool:
    """Whether the index holds the keys themselves, so that its distances are exact."""
    ivf = faiss.downcast_index(index)
    if isinstance(ivf, faiss.IndexIVFFlat):
        return True
    half = isinstance(ivf, faiss.IndexIVFScalarQuantizer) and ivf.sq.qtype == faiss.ScalarQuantizer.QT_fp16
    return half and not ivf.by_residual and datastore.manifest.key_dtype == "float16"


def _key_reader(ivf: faiss.IndexIVF, datastore: Datastore) -> Callable[..., np.ndarray]:
    """A function (cluster, ids (m,), which of its entries these are) -> keys (m, dim)."""
    if ivf.d != datastore.dim or not stores_exact_keys(ivf, datastore):
        return lambda cluster, ids, chosen: datastore.gather_keys(ids)
    dtype = np.float32 if isinstance(ivf, faiss.IndexIVFFlat) else np.float16

    def read(cluster: int, ids: np.ndarray, chosen: np.ndarray | slice) -> np.ndarray:
        size = ivf.get_list_size(cluster)
        codes = faiss.rev_swig_ptr(ivf.invlists.get_codes(cluster), size * ivf.code_size)
        return codes.view(dtype).reshape(size, -1)[chosen]

    return read
