"""Which index and which search engine a choice of neighbours (mask) and distances (score) needs."""

import torch

from ..datastore import Datastore
from ..errors import KnnlmError
from ..index import IndexInfo, build_index_if_missing, extract_ivf, list_indexes, open_index, plan_index
from ..index.info import stores_exact_keys
from ..index.list_files import open_lists
from ..search import ExactSearch, FaissSearch, ListSearch, RescoredSearch, Search
from ..search.faiss_gpu import to_gpu


def choose_index(
    datastore: Datastore, spec: str | None, k: int | None, metric: str, mask: str, score: str
) -> IndexInfo | None:
    """The index that a search needs, built if it is missing; None: it reads every key and needs none."""
    if mask == "exact" and score == "exact":
        return None
    if k is None and score == "index":
        raise KnnlmError("--knn-k all is exact by definition; leave out --knn-score index")
    if k is None and spec is not None and all(spec not in (i.name, i.spec) for i in list_indexes(datastore)):
        plan = plan_index(spec, len(datastore), datastore.dim, datastore.manifest.key_dtype, metric)
        _check_has_lists(plan.factory)  # before it is built
    return build_index_if_missing(datastore, spec, metric)


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
    device: torch.device | str = "cpu",
) -> Search:
    """The engine for a choice of neighbours (mask) and distances (score).

    Args:
        far: with k = None (all), how many more lists take part as Gaussians
        device: where distances are computed
    """
    index = None if info is None else open_index(datastore, info)
    if info is None or index is None:  # flat: the index's neighbours and distances are the exact ones
        return ExactSearch(datastore, metric)
    ivf = extract_ivf(index)
    lists = open_lists(datastore, info)
    if k is None:
        if ivf is None:
            _check_has_lists(info.factory)
        return ListSearch(index, datastore, metric, nprobe, lists, far, device)
    if mask == "exact":
        if ivf is not None:
            ivf.make_direct_map()
        return RescoredSearch(ExactSearch(datastore, metric), index.reconstruct_batch, metric)
    if stores_exact_keys(index, datastore):  # the index's distances are the exact ones
        return ListSearch(index, datastore, metric, nprobe, lists, device=device)
    engine = FaissSearch(to_gpu(index, k, torch.device(device)), nprobe)
    return engine if score == "index" else RescoredSearch(engine, datastore.gather_keys, metric)
