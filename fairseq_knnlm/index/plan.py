"""What a spec means for a datastore of a given size, and what it will cost."""

import re
import time
from dataclasses import dataclass

import faiss
import numpy as np
import torch

from ..errors import KnnlmError
from .info import extract_ivf, faiss_metric, last_line
from .kmeans import ROUNDS, nearest_centroids
from .list_records import partition_bytes

BOUNDED_MEMORY = 2 << 30  # of a build that writes its lists one after the other
PRESETS = ("auto", "paper", "flat")
POINTS_PER_CENTROID = 50  # FAISS warns below 39; more trains longer for little
# Around so many entries per inverted list, so that the default nprobe of 32 visits 20,000 at every size.
ENTRIES_PER_LIST = 640
# With more lists than this, comparing a key with every centroid costs more than comparing it with the entries; then
# the centroids are in lists themselves, of which the nearest are looked at when a key is added or searched.
MOST_FLAT_CENTROIDS = 2048
GROUPS_FOR_ADDING = 4
KEY_CODES = {"float16": "SQfp16", "float32": "Flat", "int8": "SQ8"}  # FAISS's, for codes that are the keys
BYTES_BESIDE_LISTS = 4  # per entry, about; see list_files
SLOWER_IN_GROUPS = 2  # than one matrix product of as many comparisons


@dataclass
class IndexPlan:
    """What will be built, and why."""

    factory: str | None
    train_size: int
    bytes: int  # of the finished index, on disk and in memory
    why: str
    disk_bytes: int = 0  # that building needs at most, with what it keeps to resume from
    memory_bytes: int = 0  # that building needs about


def plan_index(spec: str, entries: int, dim: int, key_dtype: str, metric: str) -> IndexPlan:
    """Resolve a preset or a factory string for a datastore of this size."""
    if spec == "flat":
        return IndexPlan(None, 0, 0, "no index: every query is compared with every stored key")
    if spec == "auto":
        plan = _plan_auto(entries, dim, key_dtype)
    elif spec == "paper":
        if dim % 64:
            raise KnnlmError(f"the paper's 64-byte codes need a dimension that 64 divides, not {dim}; use auto")
        plan = _plan_factory("IVF4096,PQ64", entries, dim, metric, sample=1_000_000)
    else:
        plan = _plan_factory(spec, entries, dim, metric)
    if plan.factory:
        by_list = is_written_by_list(plan.factory)
        plan.memory_bytes = min(plan.bytes, BOUNDED_MEMORY) if by_list else plan.bytes
        plan.disk_bytes = plan.bytes + _bytes_to_resume_from(plan, entries, dim, metric)
        if by_list:
            plan.disk_bytes += entries * BYTES_BESIDE_LISTS
    return plan


def is_written_by_list(factory: str) -> bool:
    """Whether we write the lists of such an index, and not FAISS, which adds to others in its own way."""
    own_way = factory.endswith("fs") or "Refine" in factory or re.search(r"PQ\d+\+", factory) is not None
    return factory.startswith("IVF") and not own_way


def _bytes_to_resume_from(plan: IndexPlan, entries: int, dim: int, metric: str) -> int:
    """What a build needs besides the index: the list of every key and the partition file; or a whole second index.

    FAISS adds to a FastScan index, to one behind a transformation, and to one without lists in its own way; then the
    half-filled index is written now and then, and is there until the finished one is.
    """
    assert plan.factory is not None
    if not is_written_by_list(plan.factory):
        return plan.bytes
    ivf = extract_ivf(faiss.index_factory(dim, plan.factory, faiss_metric(metric)))
    return 4 * entries + (partition_bytes(entries, ivf.code_size) if ivf is not None else 0)


def _plan_auto(entries: int, dim: int, key_dtype: str) -> IndexPlan:
    if entries < 20_000:
        return IndexPlan(None, 0, 0, f"no index: {entries:,} entries are searched exactly in no time")
    lists = 1 << max(5, min(18, round(np.log2(entries / ENTRIES_PER_LIST))))
    ivf = f"IVF{lists}"
    if lists > MOST_FLAT_CENTROIDS:
        ivf += f"(IVF{1 << round(np.log2(lists) / 2)},Flat)"
    train = min(entries, lists * POINTS_PER_CENTROID)
    size = entries * (dim * np.dtype(key_dtype).itemsize + 8) + lists * dim * 4
    why = f"{lists} lists holding the keys themselves: no rescoring needed, and read in order where memory is small"
    return IndexPlan(f"{ivf},{KEY_CODES[key_dtype]}", train, size, why)


def _plan_factory(factory: str, entries: int, dim: int, metric: str, sample: int = 0) -> IndexPlan:
    lists = re.search(r"IVF(\d+)", factory)
    why = "as given"
    if lists and entries < 39 * int(lists[1]):
        fewer = 1 << max(0, int(np.log2(max(1, entries // 39))))
        factory = factory.replace(lists[0], f"IVF{fewer}")
        why = f"{entries:,} entries are too few for {lists[1]} lists, so {fewer}"
        lists, groups = re.search(r"IVF(\d+)", factory), re.search(r"\(IVF(\d+),Flat\)", factory)
        if groups and int(groups[1]) > fewer:
            factory = factory.replace(groups[0], f"(IVF{1 << round(np.log2(fewer) / 2)},Flat)")
    bits = re.search(r"PQ\d+(?:x(\d+))?", factory)
    if bits and entries < 1 << int(bits[1] or 8):
        raise KnnlmError(
            f"{factory} needs {1 << int(bits[1] or 8)} entries to train its codes but there are {entries}; "
            "use --knn-index flat"
        )
    try:
        empty = faiss.index_factory(dim, factory, faiss_metric(metric))
    except RuntimeError as error:
        raise KnnlmError(
            f"'{factory}' is neither a preset ({', '.join(PRESETS)}) nor a FAISS factory string for dimension {dim} "
            f"({last_line(error)}); see the FAISS wiki, 'The index factory'"
        ) from error
    try:
        bytes_per_entry = empty.sa_code_size() + 8
    except RuntimeError:  # graph indexes cannot say
        bytes_per_entry = dim * 4 + 256
    wanted = sample or POINTS_PER_CENTROID * max(int(lists[1]) if lists else 0, 1000)
    return IndexPlan(factory, min(entries, wanted), entries * bytes_per_entry, why)


def estimate_time(plan: IndexPlan, entries: int, dim: int) -> str:
    """Rough: k-means (10 rounds over the sample) and assignment are matrix products, so time a small one."""
    lists = re.search(r"IVF(\d+)(?:\(IVF(\d+),Flat\))?", plan.factory or "")
    if not lists:
        return "an unknown time"
    count, groups = int(lists[1]), int(lists[2] or 0)
    # centroids that a key of the sample, and later every key, is compared with
    in_training, in_adding = float(count), float(count)
    if groups:
        in_training, in_adding = groups + count / groups, groups + GROUPS_FOR_ADDING * count / groups
        in_adding *= SLOWER_IN_GROUPS
    flops = 2 * dim * (ROUNDS * in_training * plan.train_size + in_adding * entries)
    block = torch.ones((4096, dim))
    times = []
    for _ in range(3):  # the first is slow, and another may be disturbed
        started = time.perf_counter()
        nearest_centroids(block, block, "l2")
        times.append(time.perf_counter() - started)
    speed = 2 * 4096 * 4096 * dim / min(times)
    minutes = flops / speed / 60
    return f"{minutes * 60:.0f} s" if minutes < 2 else f"{minutes:.0f} min"
