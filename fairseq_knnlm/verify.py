"""Is a datastore what its manifest says? Checksums, row counts, indexes against keys, a sample of self-searches."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .datastore import Datastore
from .errors import KnnlmError
from .files import file_sha256
from .index import IndexInfo, list_indexes, open_index
from .search import FaissSearch

SELF_SEARCHES = 100
SELF_SEARCH_NPROBE = 32


@dataclass
class Check:
    what: str
    problem: str = ""  # empty: all is well


def verify(datastore: Datastore) -> Iterator[Check]:
    """Every check, as it is done. Opening the datastore has compared shapes and dtypes already."""
    yield Check("files and row counts")
    for name, damaged in datastore.damaged_files():
        yield Check(name, "the checksum differs; restore it from a copy or dump again" if damaged else "")
    vocabulary = datastore.manifest.source.get("dictionary_size")
    if vocabulary is not None:
        yield Check("values", "" if datastore.values.max() < vocabulary else "a value is outside the dictionary")
    for info in list_indexes(datastore):
        yield _verify_index(datastore, info)


def _verify_index(datastore: Datastore, info: IndexInfo) -> Check:
    what = f"index {info.name}"
    if info.keys_fingerprint != datastore.fingerprint:
        return Check(what, "built from other keys; run knnlm build again")
    if info.factory is None:
        return Check(what)
    try:
        index = open_index(datastore, info)
    except KnnlmError as error:
        return Check(what, str(error))
    if file_sha256(datastore.folder / "index" / info.name / "index.faiss") != info.sha256:
        return Check(what, "the checksum differs; run knnlm build again")
    found = self_search_rate(datastore, FaissSearch(index, SELF_SEARCH_NPROBE), info.metric)
    # Codes may confuse a key with a near-duplicate, and the best inner product need not be one's own. But an index
    # that misses its own keys most of the time does not hold them.
    if info.metric == "l2" and found < 0.5:
        return Check(what, f"only {found:.0%} of sampled keys find themselves; run knnlm build again")
    return Check(f"{what} ({found:.0%} of sampled keys find themselves)")


def self_search_rate(datastore: Datastore, engine: FaissSearch, metric: str, seed: int = 1) -> float:
    """Share of sampled entries that are among their own 100 neighbours (or tie with the last of them)."""
    count = min(SELF_SEARCHES, len(datastore))
    ids = np.sort(np.random.default_rng(seed).choice(len(datastore), count, replace=False))
    queries = datastore.gather_keys(ids).astype(np.float32)
    distances, found = engine.search(queries, 100)
    tied = distances[:, -1] <= 1e-3 if metric == "l2" else np.zeros(count, bool)  # more than 100 duplicates
    return float(((found == ids[:, None]).any(axis=1) | tied).mean())
