"""Entries on their way into inverted lists: as records that can be sorted, then as FAISS has them."""

from collections.abc import Callable

import faiss
import numpy as np

from ..datastore import Datastore
from ..datastore.list_file import ID_BYTES, to_codes
from .info import stores_exact_keys


def encoder(ivf: faiss.IndexIVF, datastore: Datastore) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A function (stored keys (n, dim), their lists (n,)) -> codes (n, code bytes)."""
    key_bytes = datastore.dim * np.dtype(datastore.manifest.key_dtype).itemsize
    if stores_exact_keys(ivf, datastore) and ivf.code_size == key_bytes:
        return lambda stored, lists: to_codes(stored)
    return lambda stored, lists: encode(ivf, datastore.codec.decode(stored), lists)


def encode(ivf: faiss.IndexIVF, keys: np.ndarray, lists: np.ndarray) -> np.ndarray:
    """The codes that the index stores: keys (n, dim), lists (n,) -> (n, code bytes)."""
    vectors, numbers = np.ascontiguousarray(keys, np.float32), np.ascontiguousarray(lists, np.int64)
    codes = np.zeros((len(keys), ivf.code_size), np.uint8)
    ivf.encode_vectors(len(keys), faiss.swig_ptr(vectors), faiss.swig_ptr(numbers), faiss.swig_ptr(codes), False)
    return codes


def partition_bytes(entries: int, code_bytes: int) -> int:
    """Disk that the partition file takes."""
    return entries * record_dtype(code_bytes).itemsize


def record_dtype(code_bytes: int) -> np.dtype:
    return np.dtype([("list", "<i4"), ("value", "<i4"), ("id", "<i8"), ("code", "u1", (code_bytes,))])


def bucket_edges(starts: np.ndarray, row_bytes: int, bucket_bytes: int) -> np.ndarray:
    """The first list of each bucket, and the end; a bucket ends with the list in which another ``bucket_bytes`` begin.

    Args:
        starts: the first row of each list, and the end
    """
    filled = np.maximum(starts[1:] - 1, 0) * row_bytes // bucket_bytes
    return np.append(np.flatnonzero(np.diff(filled, prepend=-1)), len(starts) - 1)


def sort_rows(rows: np.ndarray) -> np.ndarray:
    """Entries in corpus order by list, in a list by value, and of one value in corpus order."""
    return rows[np.argsort(rows["list"].astype(np.int64) << 32 | rows["value"], kind="stable")]


def make_records(
    datastore: Datastore, start: int, stored: np.ndarray, lists: np.ndarray, encode_block: Callable, dtype: np.dtype
) -> np.ndarray:
    """The entries from ``start`` on as records, of stored keys (n, dim) and their lists (n,)."""
    rows = np.empty(len(stored), dtype)
    rows["list"], rows["value"] = lists, datastore.read_values(start, start + len(stored))
    rows["id"] = np.arange(start, start + len(stored))
    rows["code"] = encode_block(stored, rows["list"])
    return rows


def interleave(rows: np.ndarray, starts: np.ndarray, code_bytes: int) -> np.ndarray:
    """The bytes of some lists as FAISS has them: of each list the codes, then the ids.

    Args:
        rows: entries by list
        starts: the first row of each list, and the end
    """
    data = np.empty(len(rows) * (code_bytes + ID_BYTES), np.uint8)
    codes, ids = rows["code"], rows["id"].copy().view(np.uint8)
    place = 0
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist()):
        middle = place + (stop - start) * code_bytes
        data[place:middle] = codes[start:stop].reshape(-1)
        place = middle + (stop - start) * ID_BYTES
        data[middle:place] = ids[start * ID_BYTES : stop * ID_BYTES]
    return data
