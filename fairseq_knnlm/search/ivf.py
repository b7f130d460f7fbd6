"""List-major search in an IVF index: each visited cluster is read once for all queries that visit it."""

from typing import Callable, Iterator

import faiss
import numpy as np

from ..datastore import Datastore
from .mass import TargetMass


class ClusterSearch:
    """Every entry of the visited clusters, with exact distances."""

    preferred_queries = 32768  # more queries share the reading of a cluster

    def __init__(self, index: faiss.Index, datastore: Datastore, metric: str, nprobe: int):
        self.datastore, self.metric = datastore, metric
        self._transform, self.ivf = _split_transform(index)
        self.nprobe = min(nprobe, self.ivf.nlist)
        self._cluster_keys = _key_reader(self.ivf, datastore)

    def target_mass(self, queries: np.ndarray, targets: np.ndarray, temperature: float):
        mass = TargetMass(queries, targets, self.metric, temperature)
        for cluster, rows in self._visits(queries):
            ids = _list_ids(self.ivf, cluster)
            mass.add(rows, self._cluster_keys(cluster, ids), self.datastore.values[ids])
        return mass.result()

    def _visits(self, queries: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Each cluster that is visited and not empty, with the numbers of the queries that visit it."""
        _, clusters = self.ivf.quantizer.search(self._transform(queries), self.nprobe)  # (n, nprobe)
        flat = clusters.ravel()
        order = np.argsort(flat, kind="stable")
        numbers, starts = np.unique(flat[order], return_index=True)
        for number, rows in zip(numbers, np.split(order // self.nprobe, starts[1:])):
            if number >= 0 and self.ivf.get_list_size(int(number)) > 0:
                yield int(number), rows


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

    return transform, faiss.extract_index_ivf(index)


def stores_exact_keys(ivf: faiss.IndexIVF, datastore: Datastore) -> bool:
    """Whether the index holds the keys themselves, so that they can be read cluster by cluster, in sequence."""
    if ivf.d != datastore.dim:
        return False
    if isinstance(ivf, faiss.IndexIVFFlat):
        return True
    half = isinstance(ivf, faiss.IndexIVFScalarQuantizer) and ivf.sq.qtype == faiss.ScalarQuantizer.QT_fp16
    return half and not ivf.by_residual and datastore.manifest.key_dtype == "float16"


def _key_reader(ivf: faiss.IndexIVF, datastore: Datastore) -> Callable[[int, np.ndarray], np.ndarray]:
    """A function (cluster, ids) -> keys (m, dim)."""
    if not stores_exact_keys(ivf, datastore):
        return lambda cluster, ids: datastore.gather_keys(ids)
    dtype = np.float32 if isinstance(ivf, faiss.IndexIVFFlat) else np.float16
    code_size = ivf.code_size

    def read(cluster: int, ids: np.ndarray) -> np.ndarray:
        codes = ivf.invlists.get_codes(cluster)
        bytes_ = faiss.rev_swig_ptr(codes, len(ids) * code_size)
        return bytes_.view(dtype).reshape(len(ids), -1)

    return read


def _list_ids(ivf: faiss.IndexIVF, cluster: int) -> np.ndarray:
    return faiss.rev_swig_ptr(ivf.invlists.get_ids(cluster), ivf.get_list_size(cluster))
