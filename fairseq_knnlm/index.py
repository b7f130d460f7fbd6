"""FAISS indexes of a datastore: what a spec means, training, adding, writing atomically, opening.

    DIR/index/<name>/index.json     spec, resolved factory string, metric, which keys it was built from
    DIR/index/<name>/index.faiss    an ordinary FAISS index (absent for ``flat``, which searches the stored keys)
"""

import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import faiss
import numpy as np
import torch
from tqdm import tqdm

from .clusters import ROUNDS, GroupedCentroids, nearest_centroids, train_centroids, train_two_level_centroids
from .datastore import Datastore
from .errors import KnnlmError
from .files import check_disk_space, disk_full, file_sha256, human_bytes, read_ahead, read_json, write_json

logger = logging.getLogger(__name__)

PRESETS = ("auto", "paper", "flat")
POINTS_PER_CENTROID = 50  # faiss warns below 39; more trains longer for little
# Around so many entries a cluster, so that the default nprobe of 32 visits 20,000 at every size.
ENTRIES_PER_CLUSTER = 640
# With more clusters than this, comparing a key with every centroid costs more than comparing it with the entries; then
# the centroids are in clusters themselves, of which the nearest are looked at when a key is added or searched.
MOST_PLAIN_CLUSTERS = 2048
GROUPS_FOR_ADDING = 4
SLOWER_IN_GROUPS = 2  # than one matrix product of as many comparisons
GROUPS_FOR_SEARCHING = 8
ADD_BLOCK = 1 << 16
CHECKPOINT_SECONDS = 300


@dataclass
class IndexInfo:
    """What index.json says."""

    name: str
    spec: str  # as asked for
    factory: str | None  # as given to FAISS; None: no index file, the stored keys are searched
    metric: str
    entries: int
    dim: int
    keys_fingerprint: str
    sha256: str | None = None
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class IndexPlan:
    """What will be built, and why."""

    factory: str | None
    train_size: int
    bytes: int
    why: str


# --- what a spec means ----------------------------------------------------------------------------------------------


def plan_index(spec: str, entries: int, dim: int, key_dtype: str, metric: str) -> IndexPlan:
    """Resolve a preset or a factory string for a datastore of this size."""
    if spec == "flat":
        return IndexPlan(None, 0, 0, "no index: every query is compared with every stored key")
    if spec == "auto":
        return _plan_auto(entries, dim, key_dtype)
    if spec == "paper":
        if dim % 64:
            raise KnnlmError(f"the paper's 64-byte codes need a dimension that 64 divides, not {dim}; use auto")
        return _plan_factory("IVF4096,PQ64", entries, dim, metric, sample=1_000_000)
    return _plan_factory(spec, entries, dim, metric)


def _plan_auto(entries: int, dim: int, key_dtype: str) -> IndexPlan:
    if entries < 20_000:
        return IndexPlan(None, 0, 0, f"no index: {entries:,} entries are searched exactly in no time")
    clusters = 1 << max(5, min(18, round(np.log2(entries / ENTRIES_PER_CLUSTER))))
    ivf = f"IVF{clusters}"
    if clusters > MOST_PLAIN_CLUSTERS:
        ivf += f"(IVF{1 << round(np.log2(clusters) / 2)},Flat)"
    key_bytes = 2 if key_dtype == "float16" else 4
    exact = entries * (dim * key_bytes + 8)
    train = min(entries, clusters * POINTS_PER_CENTROID)
    if exact < 0.6 * _available_memory():
        codec = "SQfp16" if key_dtype == "float16" else "Flat"
        why = f"{clusters} clusters holding the keys themselves, which fit in memory: no rescoring needed"
        return IndexPlan(f"{ivf},{codec}", train, exact + clusters * dim * 4, why)
    codes = next(m for m in (128, 64, 32, 16, 8, 4, 2, 1) if dim % m == 0 and 2 * m <= dim)
    why = f"{clusters} clusters of 4-bit codes ({codes // 2} bytes a key), since the keys do not fit in memory"
    return IndexPlan(f"{ivf},PQ{codes}x4fs", train, entries * (codes // 2 + 8) + clusters * dim * 4, why)


def _plan_factory(factory: str, entries: int, dim: int, metric: str, sample: int = 0) -> IndexPlan:
    clusters = re.search(r"IVF(\d+)", factory)
    why = "as given"
    if clusters and entries < 39 * int(clusters[1]):
        fewer = 1 << max(0, int(np.log2(max(1, entries // 39))))
        factory = factory.replace(clusters[0], f"IVF{fewer}")
        why = f"{entries:,} entries are too few for {clusters[1]} clusters, so {fewer}"
        clusters = re.search(r"IVF(\d+)", factory)
    bits = re.search(r"PQ\d+(?:x(\d+))?", factory)
    if bits and entries < 1 << int(bits[1] or 8):
        raise KnnlmError(
            f"{factory} needs {1 << int(bits[1] or 8)} entries to train its codes but there are {entries}; "
            "use --knn-index flat"
        )
    try:
        empty = faiss.index_factory(dim, factory, _faiss_metric(metric))
    except RuntimeError as error:
        raise KnnlmError(
            f"'{factory}' is neither a preset ({', '.join(PRESETS)}) nor a FAISS factory string for dimension {dim} "
            f"({_last_line(error)}); see the FAISS wiki, 'The index factory'"
        ) from error
    try:
        bytes_per_entry = empty.sa_code_size() + 8
    except RuntimeError:  # graph indexes cannot say
        bytes_per_entry = dim * 4 + 256
    wanted = sample or POINTS_PER_CENTROID * max(int(clusters[1]) if clusters else 0, 1000)
    return IndexPlan(factory, min(entries, wanted), entries * bytes_per_entry, why)


def _available_memory() -> int:
    """In bytes; what the system keeps of files counts, since it gives that up when asked to."""
    try:
        with open("/proc/meminfo") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # another system than Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _faiss_metric(metric: str) -> int:
    return faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].split("Error: ")[-1]


def extract_ivf(index: faiss.Index) -> faiss.IndexIVF | None:
    """The IVF index inside (behind PCA, OPQ), as its own class, or None. FAISS itself returns the base class."""
    ivf = faiss.try_extract_index_ivf(index)
    return None if ivf is None else faiss.downcast_index(ivf)


def index_name(spec: str, metric: str) -> str:
    """The folder of a spec: its own name, made safe, and the metric unless it is the usual one."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", spec)
    return name if metric == "l2" else f"{name}-{metric}"


# --- building -------------------------------------------------------------------------------------------------------


def build_index(datastore: Datastore, spec: str, metric: str, name: str | None = None, seed: int = 1) -> IndexInfo:
    """Build an index, or finish one that was interrupted; it appears under its name only when it is whole."""
    name = name or index_name(spec, metric)
    folder = datastore.folder / "index" / name
    info = IndexInfo(name, spec, None, metric, len(datastore), datastore.dim, datastore.fingerprint)
    plan = plan_index(spec, len(datastore), datastore.dim, datastore.manifest.key_dtype, metric)
    info.factory = plan.factory
    logger.info(f"index {name}: {plan.factory or 'flat'} ({plan.why})")
    work = folder.with_name(f"{name}.partial")
    work.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    if plan.factory:
        check_disk_space(work, plan.bytes, f"the index {name}")
        logger.info(
            f"needs about {human_bytes(plan.bytes)} of memory and of disk, and {_estimate(plan, datastore)} to build"
        )
        _discard_other_build(work, info, seed)
        index = _trained(datastore, plan, metric, work, seed)
        _add(datastore, index, metric, work)
        _write_faiss(index, work / "index.faiss")
        info.sha256 = file_sha256(work / "index.faiss")
        info.bytes = (work / "index.faiss").stat().st_size
    info.seconds = round(time.perf_counter() - started, 1)
    for leftover in ("trained.faiss", "clusters", "added.faiss", "build.json"):
        (work / leftover).unlink(missing_ok=True)
    write_json(work / "index.json", asdict(info))
    if folder.exists():  # built before, from other keys or with another spec of this name
        shutil.rmtree(folder)
    os.replace(work, folder)
    logger.info(f"index {name} is ready: {human_bytes(info.bytes)}, {info.seconds:.0f}s")
    return info


def _estimate(plan: IndexPlan, datastore: Datastore) -> str:
    """Rough: k-means (10 rounds over the sample) and assignment are matrix products, so time a small one."""
    clusters = re.search(r"IVF(\d+)(?:\(IVF(\d+),Flat\))?", plan.factory)
    if not clusters:
        return "an unknown time"
    count, groups = int(clusters[1]), int(clusters[2] or 0)
    # centroids that a key of the sample, and later every key, is compared with
    in_training, in_adding = count, count
    if groups:
        in_training, in_adding = groups + count / groups, groups + GROUPS_FOR_ADDING * count / groups
        in_adding *= SLOWER_IN_GROUPS
    flops = 2 * datastore.dim * (ROUNDS * in_training * plan.train_size + in_adding * len(datastore))
    block = torch.ones((4096, datastore.dim))
    times = []
    for _ in range(3):  # the first is slow, and another may be disturbed
        started = time.perf_counter()
        nearest_centroids(block, block, "l2")
        times.append(time.perf_counter() - started)
    speed = 2 * 4096 * 4096 * datastore.dim / min(times)
    minutes = flops / speed / 60
    return f"{minutes * 60:.0f} s" if minutes < 2 else f"{minutes:.0f} min"


def _discard_other_build(work: Path, info: IndexInfo, seed: int) -> None:
    """Continue an interrupted build only if it is the same one, and in the same steps ("version")."""
    same = {"factory": info.factory, "metric": info.metric, "keys": info.keys_fingerprint, "seed": seed, "version": 2}
    record = work / "build.json"
    if not record.exists() or read_json(record) != same:
        for path in work.iterdir():
            path.unlink()
        write_json(record, same)


def _trained(datastore: Datastore, plan: IndexPlan, metric: str, work: Path, seed: int) -> faiss.Index:
    """The index after training, or with the entries that an interrupted build had added."""
    for path in (work / "added.faiss", work / "trained.faiss"):
        if path.exists():
            return faiss.read_index(str(path))
    index = faiss.index_factory(datastore.dim, plan.factory, _faiss_metric(metric))
    ivf = extract_ivf(index)
    if isinstance(ivf, faiss.IndexIVFScalarQuantizer) and ivf.sq.qtype == faiss.ScalarQuantizer.QT_fp16:
        ivf.by_residual = False  # then the codes are the float16 keys themselves
    if isinstance(ivf, faiss.IndexIVFPQ):
        ivf.do_polysemous_training = False  # minutes of work for a search by Hamming distance that we never do
    if index.is_trained:
        return index
    rows = np.random.default_rng(seed).choice(len(datastore), plan.train_size, replace=False)
    # from a datastore of its own, so that the pages it touches are not mapped any longer than it takes
    sample = Datastore(datastore.folder).gather_keys(np.sort(rows)).astype(np.float32)
    logger.info(f"training on {plan.train_size:,} keys")
    bare = _bare_ivf(index)
    groups = _clusters_of_clusters(bare)
    if _has_plain_clusters(bare):
        # FAISS takes the clusters that are there and trains the codes only
        ivf.quantizer.add(train_centroids(sample, ivf.nlist, metric, seed))
    elif groups is not None:
        centroids = train_two_level_centroids(sample, groups.nlist, ivf.nlist, metric, seed)
        groups.cp.min_points_per_centroid = 1  # or FAISS warns: these points are few and all there are
        groups.train(centroids)
        groups.add(centroids)
    elif ivf is not None:
        ivf.cp.seed = seed
    index.train(sample)
    _write_faiss(index, work / "trained.faiss")
    return index


def _bare_ivf(index: faiss.Index) -> faiss.IndexIVF | None:
    """The index itself, if it has clusters of the keys as they are (no PCA before, no refinement after)."""
    return None if isinstance(index, faiss.IndexPreTransform | faiss.IndexRefine) else extract_ivf(index)


def _has_plain_clusters(ivf: faiss.IndexIVF | None) -> bool:
    """Whether the clusters are a list of centroids (no graph over them)."""
    return ivf is not None and isinstance(faiss.downcast_index(ivf.quantizer), faiss.IndexFlat)


def _clusters_of_clusters(ivf: faiss.IndexIVF | None) -> faiss.IndexIVF | None:
    """The IVF index over the centroids, as in ``IVF16384(IVF128,Flat),...``, if there is one."""
    quantizer = None if ivf is None else faiss.downcast_index(ivf.quantizer)
    return quantizer if isinstance(quantizer, faiss.IndexIVF) else None


def _add(datastore: Datastore, index: faiss.Index, metric: str, work: Path) -> None:
    """Add the entries that are not in the index yet, one block of keys in memory at a time."""
    ivf = _bare_ivf(index)
    groups = _clusters_of_clusters(ivf)
    if groups is not None:
        groups.nprobe = GROUPS_FOR_ADDING  # where FAISS finds the clusters itself
    if ivf is None or isinstance(ivf, faiss.IndexIVFFastScan):
        _add_in_order(datastore, index, work)
    else:
        _add_by_cluster(datastore, ivf, metric, work)
    if groups is not None:
        groups.nprobe = GROUPS_FOR_SEARCHING  # FAISS keeps it in the file


def _add_in_order(datastore: Datastore, index: faiss.Index, work: Path) -> None:
    """As FAISS does it; what has been added is written now and then."""
    started = time.perf_counter()
    with tqdm(total=len(datastore), initial=index.ntotal, unit=" keys", unit_scale=True, desc="adding") as bar:
        for block in datastore.key_blocks(ADD_BLOCK, start=index.ntotal):
            index.add(np.ascontiguousarray(block, np.float32))
            bar.update(len(block))
            if time.perf_counter() - started > CHECKPOINT_SECONDS and index.ntotal < len(datastore):
                before = time.perf_counter()
                _write_faiss(index, work / "added.faiss")
                # Writing a large index takes long; let it be a twentieth of the time at most.
                started = time.perf_counter() + max(0.0, 20 * (time.perf_counter() - before) - CHECKPOINT_SECONDS)


def _add_by_cluster(datastore: Datastore, ivf: faiss.IndexIVF, metric: str, work: Path) -> None:
    """Find the cluster of every key first, so that each list is given its room at once.

    Lists that grow leave their former places behind, which at the end is half as much again as the index.
    """
    clusters = _find_clusters(datastore, ivf, metric, work / "clusters")
    for number, size in enumerate(np.bincount(clusters, minlength=ivf.nlist).tolist()):
        ivf.invlists.resize(number, size)
        ivf.invlists.resize(number, 0)  # which keeps the room
    with tqdm(total=len(datastore), unit=" keys", unit_scale=True, desc="adding") as bar:
        for block in datastore.key_blocks(ADD_BLOCK):
            keys = np.ascontiguousarray(block, np.float32)
            ids = np.arange(ivf.ntotal, ivf.ntotal + len(keys))
            numbers = clusters[ids].astype(np.int64)
            ivf.add_core(len(keys), faiss.swig_ptr(keys), faiss.swig_ptr(ids), faiss.swig_ptr(numbers))
            bar.update(len(keys))


def _find_clusters(datastore: Datastore, ivf: faiss.IndexIVF, metric: str, path: Path) -> np.ndarray:
    """The cluster of every key, (entries,) int32; from a file that an interrupted build goes on with."""
    find = _cluster_finder(ivf, metric)
    try:
        with open(path, "ab") as file:
            done = file.tell() // 4
            file.truncate(4 * done)
            with tqdm(total=len(datastore), initial=done, unit=" keys", unit_scale=True, desc="assigning") as bar:
                for block in datastore.key_blocks(ADD_BLOCK, start=done):
                    file.write(find(np.ascontiguousarray(block, np.float32)).astype(np.int32))
                    bar.update(len(block))
    except OSError as error:
        raise disk_full(error, path) from error
    return np.fromfile(path, np.int32)


def _cluster_finder(ivf: faiss.IndexIVF, metric: str) -> Callable[[np.ndarray], np.ndarray]:
    """Keys (n, dim) float32 -> the cluster of each (n,)."""
    groups = _clusters_of_clusters(ivf)
    if groups is None and not _has_plain_clusters(ivf):
        return lambda keys: ivf.quantizer.assign(keys, 1)[:, 0]
    centroids = torch.from_numpy(ivf.quantizer.reconstruct_n(0, ivf.nlist))
    if groups is None:
        return lambda keys: nearest_centroids(torch.from_numpy(keys), centroids, metric)[:, 0].numpy()
    grouped = GroupedCentroids(torch.from_numpy(groups.quantizer.reconstruct_n(0, groups.nlist)), centroids, metric)
    return lambda keys: grouped.nearest(torch.from_numpy(keys), GROUPS_FOR_ADDING).numpy()


def _write_faiss(index: faiss.Index, path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        faiss.write_index(index, str(temporary))
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_full(error, path) from error
    except RuntimeError as error:  # how FAISS reports a failed write
        temporary.unlink(missing_ok=True)
        raise KnnlmError(f"{path} could not be written ({_last_line(error)}); is the disk full?") from error
    os.replace(temporary, path)


def index_file(datastore: Datastore, name: str) -> Path:
    """Where the FAISS index of this name is."""
    return datastore.folder / "index" / name / "index.faiss"


# --- opening --------------------------------------------------------------------------------------------------------


def list_indexes(datastore: Datastore) -> list[IndexInfo]:
    folders = sorted((datastore.folder / "index").glob("*/index.json"))
    return [_read_info(path) for path in folders if not path.parent.name.endswith(".partial")]


def _read_info(path: Path) -> IndexInfo:
    try:
        return IndexInfo(**read_json(path))
    except TypeError as error:
        raise KnnlmError(f"{path} is damaged ({error}); delete its folder and run knnlm build again") from error


def build_index_if_missing(datastore: Datastore, spec: str | None, metric: str) -> IndexInfo:
    """The index of this spec; without one the only index of this metric, or else ``auto``. Built when missing."""
    present = [info for info in list_indexes(datastore) if info.metric == metric]
    if spec is None:
        automatic = [info for info in present if info.name == index_name("auto", metric)]
        chosen = automatic or (present if len(present) == 1 else [])
        spec = "auto"
    else:
        chosen = [info for info in present if info.name in (spec, index_name(spec, metric))]
    if chosen and chosen[0].keys_fingerprint == datastore.fingerprint:
        return chosen[0]
    if chosen:
        logger.warning(f"index {chosen[0].name} was built from other keys than {datastore.folder} has now; rebuilding")
    return build_index(datastore, spec, metric)


def open_index(datastore: Datastore, info: IndexInfo) -> faiss.Index | None:
    """The FAISS index, memory-mapped where FAISS can, or None for ``flat``."""
    if info.factory is None:
        return None
    path = index_file(datastore, info.name)
    remedy = f"run knnlm build {datastore.folder} --index '{info.spec}' again"
    if not path.exists():
        raise KnnlmError(f"{path} is missing; {remedy}")
    if path.stat().st_size != info.bytes:
        raise KnnlmError(f"{path} has {path.stat().st_size:,} bytes instead of {info.bytes:,}; {remedy}")
    if info.bytes < _available_memory():
        read_ahead(path)
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise KnnlmError(f"{path} is damaged ({_last_line(error)}); {remedy}") from error
    if index.ntotal != len(datastore) or index.d != datastore.dim:
        raise KnnlmError(
            f"{path} holds {index.ntotal:,} keys of dimension {index.d} but {datastore.folder} has "
            f"{len(datastore):,} of {datastore.dim}; {remedy}"
        )
    return index
