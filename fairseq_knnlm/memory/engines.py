"""Which index and which search engine a choice of neighbours (mask) and distances (score) needs."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..datastore import Datastore
from ..errors import KnnlmError
from ..index import IndexInfo, build_index_if_missing, extract_ivf, list_indexes, open_index, plan_index
from ..index.info import stores_exact_keys
from ..index.list_files import open_lists
from ..search import ExactSearch, FaissSearch, ListSearch, RescoredSearch, Search
from ..search.early import VisitRule
from ..search.faiss_engine import with_nprobe
from ..search.faiss_gpu import to_gpu
from .devices import lists_stay_on

logger = logging.getLogger(__name__)


def choose_index(
    datastore: Datastore,
    spec: str | None,
    k: int | None,
    metric: str,
    mask: str,
    score: str,
    device: torch.device | str = "cpu",
) -> IndexInfo | None:
    """The index that a search needs, built on ``device`` if missing; None: it reads every key and needs no index."""
    if mask == "exact" and score == "exact":
        return None
    if k is None and score == "index":
        raise KnnlmError("--knn-k all is exact by definition; leave out --knn-score index")
    if k is None and spec is not None and all(spec not in (i.name, i.spec) for i in list_indexes(datastore)):
        plan = plan_index(spec, len(datastore), datastore.dim, datastore.manifest.key_dtype, metric)
        _check_has_lists(plan.factory)  # before it is built
    return build_index_if_missing(datastore, spec, metric, device)


@dataclass
class RayCluster:
    """Where lists are spread over the nodes of a Ray cluster."""

    address: str  # auto, HOST:PORT or local
    device: str = "auto"  # of the actors: cpu, cuda or auto

    def check(self, mask: str, score: str) -> None:
        """Refuse what actors do not answer, before anything is opened."""
        from ..cluster.connection import check_address, import_ray

        check_address(self.address)
        if (mask, score) != ("index", "exact"):
            flag = "--knn-mask exact" if mask == "exact" else "--knn-score index"
            raise KnnlmError(f"{flag} needs every key or FAISS's own codes here; use --knn-engine local for it")
        import_ray()


def _check_has_lists(factory: str | None) -> None:
    if factory is not None and "IVF" not in factory:
        raise KnnlmError(f"--knn-k all needs an index with inverted lists, not {factory}; use --knn-index auto")


def make_engine(
    datastore: Datastore,
    info: IndexInfo | None,
    k: int | None,
    metric: str,
    mask: str,
    score: str,
    nprobe: int,
    far: int = 0,
    devices: Sequence[torch.device | str] = ("cpu",),
    precision: torch.dtype = torch.float32,
    rule: VisitRule | None = None,
    cluster: RayCluster | None = None,
) -> Search:
    """The engine for a choice of neighbours (mask) and distances (score).

    Args:
        far: with k = None (all), how many more lists take part as Gaussians
        devices: where distances are computed; with several, each has a range of the lists
        precision: of the factors of distances on a GPU
        rule: with k = None (all), which lists are not worth a visit
        cluster: search with its nodes, which have devices of their own
    """
    if rule is not None and (k is not None or info is None or info.factory is None):
        raise KnnlmError("--knn-gate-skip goes with --knn-k all and an index with inverted lists; use --knn-index auto")
    if cluster is not None:
        return _ray_engine(datastore, info, k, nprobe, far, precision, rule, cluster)
    index = None if info is None else open_index(datastore, info)
    if info is None or index is None:  # flat: the index's neighbours and distances are the exact ones
        return ExactSearch(datastore, metric)
    ivf = extract_ivf(index)
    lists = open_lists(datastore, info)
    resident = lists_stay_on(devices, info)

    def list_search(far: int) -> ListSearch:
        return ListSearch(index, datastore, metric, nprobe, lists, far, devices, resident, precision, rule)

    if k is None:
        if ivf is None:
            _check_has_lists(info.factory)
        return list_search(far)
    if mask == "exact":
        if ivf is not None:
            ivf.make_direct_map()
        return RescoredSearch(ExactSearch(datastore, metric), index.reconstruct_batch, metric)
    if stores_exact_keys(index, datastore):  # the index's distances are the exact ones
        return list_search(far=0)
    if len(devices) > 1:
        logger.info(f"the index {info.name} holds codes of FAISS's own, which are searched on {devices[0]} alone")
    engine = FaissSearch(to_gpu(with_nprobe(index, nprobe), k, torch.device(devices[0])), nprobe)
    return engine if score == "index" else RescoredSearch(engine, datastore.gather_keys, metric)


def _ray_engine(
    datastore: Datastore,
    info: IndexInfo | None,
    k: int | None,
    nprobe: int,
    far: int,
    precision: torch.dtype,
    rule: VisitRule | None,
    cluster: RayCluster,
) -> Search:
    from ..cluster.ray_search import make_ray_search

    assert info is not None  # RayCluster.check has refused what needs no index
    engine = make_ray_search(datastore, info, nprobe, far, cluster.address, cluster.device, precision, rule=rule)
    if k is not None and not engine.holds_keys:
        raise KnnlmError(
            f"the index {info.name} holds codes instead of keys, whose neighbours are ranked by FAISS on one machine; "
            "use --knn-k all, an index with the keys (--knn-index auto), or --knn-engine local"
        )
    return engine
