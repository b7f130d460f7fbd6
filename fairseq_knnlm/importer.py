"""Adopt a datastore of the original implementation: raw memory maps without a header, and a FAISS index.

The original writes ``<prefix>_keys.npy`` (float16 or float32) and ``<prefix>_vals.npy`` (int16 or int64), and its user
has to remember the sizes. Here they are deduced from the file sizes and the index, and always checked.
"""

import logging
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
from tqdm import tqdm

from .datastore import Datastore, DatastoreWriter, Manifest, plan_shards, value_dtype_for
from .errors import KnnlmError
from .files import file_sha256, write_json
from .index import IndexInfo
from .search import FaissSearch
from .verify import self_search_rate

logger = logging.getLogger(__name__)

SHARD_ROWS = 1 << 18


class RawLayout(NamedTuple):
    """How the raw files are to be read."""

    entries: int
    dim: int
    key_dtype: str
    value_dtype: str


def deduce_layout(
    keys_path: Path, values_path: Path, dim: int | None, entries: int | None, vocabulary_size: int
) -> RawLayout:
    """The one reading of the two files that fits their sizes and holds plausible numbers."""
    key_bytes, value_bytes = keys_path.stat().st_size, values_path.stat().st_size
    candidates = []
    for value_dtype in ("int16", "int32", "int64"):
        rows, rest = divmod(value_bytes, np.dtype(value_dtype).itemsize)
        if rest or not rows or (entries is not None and rows != entries):
            continue
        for key_dtype in ("float16", "float32"):
            width, rest = divmod(key_bytes, rows * np.dtype(key_dtype).itemsize)
            if rest or not width or (dim is not None and width != dim):
                continue
            layout = RawLayout(rows, width, key_dtype, value_dtype)
            if _plausible(keys_path, values_path, layout, vocabulary_size):
                candidates.append(layout)
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        options = "; ".join(f"{c.entries:,} x {c.dim} {c.key_dtype}, values {c.value_dtype}" for c in candidates)
        raise KnnlmError(f"{keys_path} can be read in several ways ({options}); say which with --dim or --size")
    raise KnnlmError(
        f"{keys_path} ({key_bytes:,} bytes) and {values_path} ({value_bytes:,} bytes) do not fit together"
        f"{f' with --dim {dim}' if dim else ''}{f' and {entries:,} entries' if entries else ''}; "
        "check that both belong to one datastore and that none is truncated"
    )


def _plausible(keys_path: Path, values_path: Path, layout: RawLayout, vocabulary_size: int) -> bool:
    keys, values = open_raw(keys_path, values_path, layout)
    rows = np.linspace(0, layout.entries - 1, min(layout.entries, 1000)).astype(int)
    some_keys, some_values = keys[rows].astype(np.float32), unsigned(values[rows])
    if not ((some_values >= 0) & (some_values < vocabulary_size)).all():
        return False
    if len(rows) > 100 and (some_values == 0).mean() > 0.3:  # the upper halves of wider integers
        return False
    return bool(np.isfinite(some_keys).all() and np.abs(some_keys).max() < 1e5 and some_keys.std() > 1e-4)


def open_raw(keys_path: Path, values_path: Path, layout: RawLayout) -> tuple[np.ndarray, np.ndarray]:
    keys = np.memmap(keys_path, layout.key_dtype, "r", shape=(layout.entries, layout.dim))
    return keys, np.memmap(values_path, layout.value_dtype, "r", shape=(layout.entries,))


def unsigned(values: np.ndarray) -> np.ndarray:
    """The original's int16 wraps for token numbers from 32768 up."""
    return values.view(np.uint16) if values.dtype == np.int16 else values


def import_datastore(
    prefix: str,
    folder: str,
    dictionary: dict[str, Any],
    key: str,
    layer: int,
    dim: int | None = None,
    entries: int | None = None,
    index_path: str | None = None,
) -> Datastore:
    """Copy raw memory maps into a datastore folder, and the index if there is one; the originals stay as they are.

    Args:
        dictionary: dictionary_sha256 and dictionary_size
    """
    keys_path, values_path = Path(f"{prefix}_keys.npy"), Path(f"{prefix}_vals.npy")
    for path in (keys_path, values_path, *([Path(index_path)] if index_path else [])):
        if not path.exists():
            raise KnnlmError(f"{path} does not exist; give the prefix of ..._keys.npy and ..._vals.npy")
    index = _read_index(index_path) if index_path else None
    if index is not None:
        dim, entries = dim or index.d, entries or index.ntotal
    layout = deduce_layout(keys_path, values_path, dim, entries, dictionary["dictionary_size"])
    logger.info(f"{layout.entries:,} entries x {layout.dim} {layout.key_dtype}, values {layout.value_dtype}")
    if index is not None and (index.ntotal, index.d) != (layout.entries, layout.dim):
        raise KnnlmError(
            f"{index_path} holds {index.ntotal:,} keys of dimension {index.d}, not these; "
            "leave --index out and build one"
        )
    _copy_entries(keys_path, values_path, layout, folder, dictionary, key, layer)
    datastore = Datastore(folder)
    if index is not None:
        _adopt_index(datastore, index, Path(index_path))
    return datastore


def _copy_entries(keys_path, values_path, layout: RawLayout, folder, dictionary, key, layer) -> None:
    row_counts = [min(SHARD_ROWS, layout.entries - start) for start in range(0, layout.entries, SHARD_ROWS)]
    manifest = Manifest(
        entries=layout.entries,
        dim=layout.dim,
        key_dtype=layout.key_dtype,
        value_dtype=value_dtype_for(dictionary["dictionary_size"]),
        key=key,
        layer=layer,
        source={"imported_from": keys_path.name, **dictionary},
        shards=plan_shards(row_counts),
    )
    keys, values = open_raw(keys_path, values_path, layout)
    writer = DatastoreWriter(folder, manifest)
    for shard in tqdm(writer.missing_shards(), unit="shard", desc="copying"):
        shard_values = unsigned(values[shard.start : shard.stop])
        if shard_values.min() < 0 or shard_values.max() >= dictionary["dictionary_size"]:
            raise KnnlmError(f"{values_path} holds tokens outside the dictionary; give the dict.txt it was made with")
        output = writer.open_shard(shard)
        output.append(keys[shard.start : shard.stop], shard_values)
        output.commit()
    writer.finish()


def _read_index(path: str) -> faiss.Index:
    try:
        return faiss.read_index(path, faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise KnnlmError(f"{path} is not a FAISS index; leave --index out and run knnlm build") from error


def _adopt_index(datastore: Datastore, index: faiss.Index, path: Path) -> None:
    metric = "ip" if index.metric_type == faiss.METRIC_INNER_PRODUCT else "l2"
    found = self_search_rate(datastore, FaissSearch(index, 32), metric)
    if metric == "l2" and found < 0.5:
        raise KnnlmError(f"{path} does not find the keys it should hold; leave --index out and run knnlm build")
    name = "imported" if metric == "l2" else f"imported-{metric}"
    folder = datastore.folder / "index" / name
    work = folder.with_name(f"{name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    shutil.copyfile(path, work / "index.faiss")
    info = IndexInfo(
        name, "imported", type(index).__name__, metric, len(datastore), datastore.dim, datastore.fingerprint,
        sha256=file_sha256(work / "index.faiss"), bytes=path.stat().st_size,
    )  # fmt: skip
    write_json(work / "index.json", asdict(info))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(work, folder)
