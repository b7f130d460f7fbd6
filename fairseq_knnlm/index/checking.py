"""Does an index hold the keys of its datastore, each once and in its place?"""

from collections.abc import Iterator

import faiss
import numpy as np

from ..datastore import Datastore
from ..errors import KnnlmError
from ..storage import file_sha256, is_intact
from .assign import list_finder
from .info import (
    IMPORTED,
    INFO_FILE,
    IndexInfo,
    has_flat_quantizer,
    index_file,
    index_folder,
    inverted_lists,
    open_index,
    remedy_for,
    split_transform,
    stores_exact_keys,
)
from .list_records import encode

SAMPLED_ENTRIES = 1 << 20  # whose codes and lists are checked, unless all are
ENTRIES_PER_CHECK = 1 << 15  # entries of several lists that are checked together
SELF_SEARCHES = 100
SELF_SEARCH_NPROBE = 32
# Codes are rounded from distances that depend on the last digit, and a quantizer with lists of its own finds the
# nearest centroid nearly always; so one in so many may differ where both are not exact.
INEXACT_SHARE = 0.005
IMPORTED_SHARE = 0.2  # another program may have added its keys with another quantizer's setting


def verify_index(datastore: Datastore, info: IndexInfo, everything: bool) -> str:
    """A problem of the index as a sentence, or an empty string."""
    if not is_intact(index_folder(datastore, info.name) / INFO_FILE):
        return f"{INFO_FILE} was edited or damaged after it was written; {remedy_for(datastore, info)}"
    if info.keys_fingerprint != datastore.fingerprint:
        return f"it was built from other keys; {remedy_for(datastore, info)}"
    if info.factory is None:
        return ""
    path = index_file(datastore, info.name)
    try:
        if path.exists() and file_sha256(path) != info.sha256:
            return f"the checksum of {path.name} differs; {remedy_for(datastore, info)}"
        for name, sha256 in (info.files or {}).items():
            if file_sha256(path.with_name(name)) != sha256:
                return f"the checksum of {name} differs; {remedy_for(datastore, info)}"
        if info.lists_file and file_sha256(path.with_name(info.lists_file)) != info.lists_sha256:
            return f"the checksum of {info.lists_file} differs; {remedy_for(datastore, info)}"
        index = open_index(datastore, info)
    except KnnlmError as error:
        return str(error)
    assert index is not None
    problem = check_index(datastore, index, info, everything)
    return f"{problem}; {remedy_for(datastore, info)}" if problem else ""


def is_sampled(datastore: Datastore, everything: bool) -> bool:
    """Whether only a part of the entries is checked against the index."""
    return not everything and len(datastore) > SAMPLED_ENTRIES


def check_index(datastore: Datastore, index: faiss.Index, info: IndexInfo, everything: bool = False) -> str:
    """Compare an open index with the stored keys; a problem as half a sentence, or an empty string.

    Where the index has inverted lists: every entry is in exactly one list, its code is that of the stored key, and its
    list is the one that its key is nearest to. Others are asked to find a sample of their own keys.
    """
    transform, ivf = split_transform(index)
    direct = index.index if isinstance(index, faiss.IndexPreTransform) else index
    if ivf is None or not isinstance(faiss.downcast_index(direct), faiss.IndexIVF):
        return _check_self_search(datastore, index, info)
    if problem := _check_ids(ivf, len(datastore)):
        return problem
    if isinstance(ivf, faiss.IndexIVFFastScan):  # whose codes are packed in an order of their own
        return _check_self_search(datastore, index, info)
    exact = index is direct and stores_exact_keys(ivf, datastore)
    allowed = 0.0 if has_flat_quantizer(ivf) else INEXACT_SHARE
    if info.spec == IMPORTED and not has_flat_quantizer(ivf):
        allowed = IMPORTED_SHARE
    find, checked, wrong_codes, wrong_lists = list_finder(ivf, info.metric), 0, 0, 0
    for lists, ids, codes in _entries(ivf, is_sampled(datastore, everything)):
        keys = transform(datastore.gather_keys(ids))
        checked += len(ids)
        wrong_codes += int((encode(ivf, keys, lists) != codes).any(axis=1).sum())
        wrong_lists += _count_misplaced(ivf, keys, lists, find(keys), info.metric)
    if wrong_codes > (0 if exact else INEXACT_SHARE) * checked:
        return f"{wrong_codes:,} of {checked:,} entries have codes that are not those of their keys"
    if wrong_lists > allowed * checked:
        return f"{wrong_lists:,} of {checked:,} entries are not in the list that their key is nearest to"
    return ""


def _check_ids(ivf: faiss.IndexIVF, entries: int) -> str:
    """Whether every entry is in exactly one list."""
    seen, total = np.zeros(entries, bool), 0
    for number in range(ivf.nlist):
        ids = _list_ids(ivf, number)
        if len(ids) and not 0 <= ids.min() <= ids.max() < entries:
            return f"list {number} holds entries that the datastore does not have"
        seen[ids] = True
        total += len(ids)
    # As many as there are, and all of them seen: then none is there twice.
    if total != entries or not seen.all():
        return f"{entries - int(seen.sum()):,} of {entries:,} entries are in no list"
    return ""


def _list_ids(ivf: faiss.IndexIVF, number: int) -> np.ndarray:
    size = ivf.get_list_size(number)
    return faiss.rev_swig_ptr(inverted_lists(ivf).get_ids(number), size).copy() if size else np.empty(0, np.int64)


def _entries(ivf: faiss.IndexIVF, sample: bool) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Lists (m,), ids (m,) and codes (m, code size) of all entries, or of those of some lists drawn at random."""
    order = np.random.default_rng(1).permutation(ivf.nlist) if sample else np.arange(ivf.nlist)
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    done = waiting = 0
    for number in order.tolist():
        ids = _list_ids(ivf, number)
        if len(ids):
            codes = faiss.rev_swig_ptr(inverted_lists(ivf).get_codes(number), len(ids) * ivf.code_size)
            parts.append((np.full(len(ids), number), ids, codes.reshape(len(ids), -1).copy()))
            waiting += len(ids)
        if waiting >= ENTRIES_PER_CHECK:
            yield _join(parts)
            done, waiting, parts = done + waiting, 0, []
            if sample and done >= SAMPLED_ENTRIES:
                return
    if parts:
        yield _join(parts)


def _join(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lists, ids, codes = (np.concatenate(column) for column in zip(*parts))
    return lists, ids, codes


def _count_misplaced(
    ivf: faiss.IndexIVF, keys: np.ndarray, lists: np.ndarray, nearest: np.ndarray, metric: str
) -> int:
    """How many keys are clearly farther from the centroid of their list than from the nearest one."""
    differ = np.flatnonzero(lists != nearest)
    if len(differ) == 0:
        return 0
    keys = keys[differ].astype(np.float64)
    own, best = (ivf.quantizer.reconstruct_batch(numbers[differ].astype(np.int64)) for numbers in (lists, nearest))
    if metric == "ip":
        own_score, best_score = ((keys * centroids).sum(axis=1) for centroids in (own, best))
    else:
        own_score, best_score = (-((keys - centroids) ** 2).sum(axis=1) for centroids in (own, best))
    scale = (keys**2).sum(axis=1)  # a matrix product rounds at the magnitude of the norms
    return int((best_score - own_score > 1e-4 * np.abs(best_score) + 1e-5 * scale).sum())


def _check_self_search(datastore: Datastore, index: faiss.Index, info: IndexInfo) -> str:
    found = self_search_rate(datastore, index, info.metric)
    # Codes may confuse a key with a near-duplicate, and the best inner product need not be one's own. But an index
    # that misses its own keys most of the time does not hold them.
    if info.metric == "l2" and found < 0.5:
        return f"only {found:.0%} of sampled keys find themselves"
    return ""


def self_search_rate(datastore: Datastore, index: faiss.Index, metric: str, seed: int = 1) -> float:
    """Share of sampled entries that are among their own 100 neighbours (or tie with the last of them)."""
    count = min(SELF_SEARCHES, len(datastore))
    ids = np.sort(np.random.default_rng(seed).choice(len(datastore), count, replace=False))
    queries = datastore.gather_keys(ids).astype(np.float32)
    _, ivf = split_transform(index)
    if ivf is not None:
        ivf.nprobe = min(SELF_SEARCH_NPROBE, ivf.nlist)
    distances, found = index.search(queries, min(100, index.ntotal))
    tied = distances[:, -1] <= 1e-3 if metric == "l2" else np.zeros(count, bool)  # more than 100 duplicates
    return float(((found == ids[:, None]).any(axis=1) | tied).mean())
