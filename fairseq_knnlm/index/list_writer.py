"""Inverted lists written in bounded memory: partition the keys on disk, then sort each part and write it in order.

The list of every key is known, so the size of every list is, too, and with it the place of everything in the file:

1. Consecutive lists make a *bucket* of some 256 MB. All keys are read once, in corpus order, and each goes with its id,
   list and value to the place of its bucket in one partition file.
2. Bucket by bucket, entries are sorted by list and value, and the lists are written one after the other.

In a list that is sorted by value, the entries of a token are one run, so the search finds them without sorting. The
runs are written beside the index (see ``list_files``), and so are the mean of every list and the spread around it.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import faiss
import numpy as np

from ..datastore import Datastore
from ..datastore.list_file import ID_BYTES, from_codes, to_codes
from ..datastore.reader import LIST_STARTS
from ..progress import progress
from ..storage import OutputFile, read_json, system, write_array, write_json
from ..storage.faults import read_failure, write_failure
from .info import stores_exact_keys
from .list_files import LIST_MEANS, LIST_SPREADS, LIST_WEIGHTS, RUN_ENDS, RUN_STARTS, RUN_VALUES

BUCKET_BYTES = 1 << 28
BUFFER_BYTES = 1 << 26  # of rows that wait to be written to their buckets
READ_ROWS = 1 << 16
ROWS_PER_SUM = 1 << 14  # keys that are floats at once when means are computed
CHECKPOINT_ROWS = 1 << 22
PARTITION, PARTITIONED = "partition.tmp", "partitioned.json"


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


def index_head(ivf: faiss.IndexIVF, sizes: np.ndarray) -> bytes:
    """What FAISS writes before the first list of an index whose lists have these sizes.

    FAISS itself writes the head of the empty index; only its last piece, the sizes, is ours.
    """
    entries, ivf.ntotal = ivf.ntotal, int(sizes.sum())
    written = faiss.serialize_index(ivf).tobytes()
    ivf.ntotal = entries
    lists = b"ilar" + np.array([ivf.nlist, ivf.code_size], np.uint64).tobytes()
    no_sizes = b"sprs" + bytes(8)
    if not written.endswith(lists + no_sizes):
        raise RuntimeError("this FAISS writes inverted lists in a way that fairseq-knnlm does not know")
    all_sizes = b"full" + np.array([ivf.nlist, *sizes.tolist()], np.uint64).tobytes()
    return written.removesuffix(no_sizes) + all_sizes


def partition_bytes(entries: int, code_bytes: int) -> int:
    """Disk that the partition file takes."""
    return entries * record_dtype(code_bytes).itemsize


def record_dtype(code_bytes: int) -> np.dtype:
    return np.dtype([("list", "<i4"), ("value", "<i4"), ("id", "<i8"), ("code", "u1", (code_bytes,))])


def bucket_edges(starts: np.ndarray, row_bytes: int, bucket_bytes: int) -> np.ndarray:
    """The first list of each bucket, and the end; a bucket ends with the list in which another 256 MB begin.

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


class ListWriter:
    """Writes the lists of one index; the caller holds the lock of its work folder."""

    def __init__(self, datastore: Datastore, ivf: faiss.IndexIVF, lists: np.ndarray, work: Path):
        """lists: of every key, (entries,), best as a map of a file."""
        self._datastore, self._ivf, self._lists, self._work = datastore, ivf, lists, work
        self._record = record_dtype(ivf.code_size)
        sizes = np.zeros(ivf.nlist, np.int64)
        for start in range(0, len(lists), 1 << 24):
            sizes += np.bincount(lists[start : start + (1 << 24)], minlength=ivf.nlist)
        self.starts = np.concatenate([[0], np.cumsum(sizes)])  # first row of each list
        self._first_lists = bucket_edges(self.starts, self._record.itemsize, BUCKET_BYTES)
        self._bucket_of_list = np.repeat(np.arange(len(self._first_lists) - 1), np.diff(self._first_lists))
        self._bucket_starts = self.starts[self._first_lists]  # first row of each bucket

    def write(self, path: Path) -> tuple[str, int]:
        """Write the whole index; its SHA-256, and how many bytes come before the lists."""
        self._partition()
        head = index_head(self._ivf, np.diff(self.starts))
        summary = ListSummary(self._datastore, self._ivf, len(self.starts) - 1)
        with OutputFile(path) as file:
            file.write(head)
            buckets = range(len(self._first_lists) - 1)
            with progress("writing lists", len(self._lists), " keys") as bar:
                for bucket in buckets:
                    rows = self._read_bucket(bucket)
                    lists = slice(self._first_lists[bucket], self._first_lists[bucket + 1] + 1)
                    starts = self.starts[lists] - self._bucket_starts[bucket]
                    summary.add(int(self._first_lists[bucket]), rows, starts)
                    file.write(interleave(rows, starts, self._ivf.code_size))
                    bar.update(len(rows))
            sha256 = file.commit()
        write_array(self._work / LIST_STARTS, self.starts)
        summary.write(self._work)
        return sha256, len(head)

    def _partition(self) -> None:
        """Bring every entry to its bucket. An interrupted run goes on where its last note says."""
        path, note = self._work / PARTITION, self._work / PARTITIONED
        done = read_json(note).get("rows", 0) if note.exists() and path.exists() else 0
        done = done if isinstance(done, int) and 0 <= done <= len(self._lists) else 0
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._fill_buckets(descriptor, done, note)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise write_failure(error, path) from error

    def _fill_buckets(self, descriptor: int, done: int, note: Path) -> None:
        buckets = len(self._bucket_starts) - 1
        filled = np.zeros(buckets, np.int64)  # rows of each bucket that are on disk
        for start in range(0, done, 1 << 24):
            some = self._lists[start : min(done, start + (1 << 24))]
            filled += np.bincount(self._bucket_of_list[some], minlength=buckets)
        waiting: list[list[np.ndarray]] = [[] for _ in range(buckets)]
        waiting_rows, noted = 0, done

        def flush() -> None:
            nonlocal waiting_rows
            for bucket, parts in enumerate(waiting):
                if parts:
                    rows = np.concatenate(parts)
                    first = self._bucket_starts[bucket] + filled[bucket]
                    system.write_at(descriptor, rows.view(np.uint8).data, int(first) * self._record.itemsize)
                    filled[bucket] += len(rows)
                    parts.clear()
            waiting_rows = 0

        with progress("partitioning", len(self._lists), " keys", done) as bar:
            for rows in self._records(done):
                buckets_of_rows = self._bucket_of_list[rows["list"]]
                order = np.argsort(buckets_of_rows.astype(np.min_scalar_type(buckets)), kind="stable")
                counts = np.bincount(buckets_of_rows, minlength=buckets)
                for bucket, part in enumerate(np.split(rows[order], np.cumsum(counts)[:-1])):
                    if len(part):
                        waiting[bucket].append(part)
                waiting_rows, done = waiting_rows + len(rows), done + len(rows)
                if waiting_rows * self._record.itemsize >= BUFFER_BYTES:
                    flush()
                    if done - noted >= CHECKPOINT_ROWS:
                        system.fsync(descriptor)
                        write_json(note, {"rows": done})
                        noted = done
                bar.update(len(rows))
        flush()
        system.fsync(descriptor)
        write_json(note, {"rows": done})

    def _records(self, start: int) -> Iterator[np.ndarray]:
        """The entries from ``start`` on, in corpus order, some at a time."""
        encode_block = encoder(self._ivf, self._datastore)
        keys = self._datastore.stored_blocks(READ_ROWS, start)
        for block in keys:
            lists = self._lists[start : start + len(block)]
            yield make_records(self._datastore, start, block, lists, encode_block, self._record)
            start += len(block)

    def _read_bucket(self, bucket: int) -> np.ndarray:
        """The entries of a bucket by list, in a list by value, and of one value in corpus order."""
        first, last = self._bucket_starts[bucket : bucket + 2].tolist()
        path = self._work / PARTITION
        try:
            rows = np.fromfile(path, self._record, last - first, offset=first * self._record.itemsize)
        except OSError as error:
            raise read_failure(error, path) from error
        return sort_rows(rows)


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


class ListSummary:
    """What is written beside the lists: runs of equal values, mean and spread of each list's keys, weights."""

    def __init__(self, datastore: Datastore, ivf: faiss.IndexIVF, lists: int):
        self._datastore, self._exact = datastore, stores_exact_keys(ivf, datastore)
        self._values: list[np.ndarray] = []
        self._ends: list[np.ndarray] = []
        self._runs = np.zeros(lists, np.int64)
        self._means = np.zeros((lists, datastore.dim), np.float32)
        self._spreads = np.zeros(lists, np.float32)
        self._weights: list[np.ndarray] = []

    def add(self, first_list: int, rows: np.ndarray, starts: np.ndarray) -> None:
        """rows: the entries of consecutive lists, starts: the first row of each of these lists, and the end."""
        changes = (np.diff(rows["list"]) != 0) | (np.diff(rows["value"]) != 0)
        ends = np.append(np.flatnonzero(changes) + 1, len(rows)) if len(rows) else np.empty(0, np.int64)
        last = rows[ends - 1]
        self._values.append(last["value"].astype(self._datastore.manifest.value_dtype))
        self._ends.append((ends - starts[last["list"] - first_list]).astype(np.int32))
        count = len(starts) - 1
        self._runs[first_list : first_list + count] = np.bincount(last["list"] - first_list, minlength=count)
        if self._datastore.weights is not None:
            self._weights.append(self._datastore.weights[rows["id"]])
        if self._exact:
            self._add_means(first_list, rows, starts)

    def _add_means(self, first_list: int, rows: np.ndarray, starts: np.ndarray) -> None:
        sizes = np.diff(starts)
        low = 0
        while low < len(sizes):
            high = max(low + 1, int(np.searchsorted(starts, starts[low] + ROWS_PER_SUM, side="right")) - 1)
            some, numbers = slice(starts[low], starts[high]), np.flatnonzero(sizes[low:high]) + low
            if len(numbers):
                keys = self._datastore.codec.decode(self._keys(rows["code"][some])).astype(np.float32)
                edges, counts = starts[numbers] - starts[low], sizes[numbers]
                means = np.add.reduceat(keys, edges) / counts[:, None]
                keys -= np.repeat(means, counts, axis=0)
                np.square(keys, out=keys)
                self._means[first_list + numbers] = means
                self._spreads[first_list + numbers] = np.add.reduceat(keys.sum(axis=1), edges) / counts
            low = high

    def _keys(self, codes: np.ndarray) -> np.ndarray:
        """Codes of keys as stored keys; a list may hold float32 where the datastore has float16."""
        dtype = np.dtype(self._datastore.manifest.key_dtype)
        if codes.shape[1] != self._datastore.dim * dtype.itemsize:
            dtype = np.dtype(np.float32)
        return from_codes(codes, dtype)

    def arrays(self) -> dict[str, np.ndarray]:
        """What is written, by the names of the files."""
        arrays = {
            RUN_STARTS: np.concatenate([[0], np.cumsum(self._runs)]),
            RUN_VALUES: np.concatenate(self._values),
            RUN_ENDS: np.concatenate(self._ends),
        }
        if self._datastore.is_weighted:
            arrays[LIST_WEIGHTS] = np.concatenate(self._weights)
        return {**arrays, LIST_MEANS: self._means, LIST_SPREADS: self._spreads} if self._exact else arrays

    def write(self, folder: Path) -> None:
        for name, array in self.arrays().items():
            write_array(folder / name, array)
