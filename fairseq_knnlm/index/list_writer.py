"""Inverted lists written in bounded memory: partition the keys on disk, then sort each part and write it in order.

The list of every key is known, so the size of every list is, too, and with it the place of everything in the file:

1. Consecutive lists make a *bucket* of some 128 MB. All keys are read once, in corpus order, and each goes with its id,
   list and value to the place of its bucket in one partition file.
2. Bucket by bucket, entries are sorted by list and value, and the lists are written one after the other. A piece is
   some buckets, after which a note is made; an interrupted build goes on from the last note.

In a list that is sorted by value, the entries of a token are one run, so the search finds them without sorting. The
runs are written beside the index (see ``list_files``), and so are the mean of every list and the spread around it.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from ..datastore import Datastore
from ..datastore.list_file import ID_BYTES
from ..progress import progress
from ..storage import read_json, system, write_json
from ..storage.faults import read_failure, write_failure
from .assign import FoundLists
from .list_records import bucket_edges, encoder, interleave, make_records, record_dtype, sort_rows
from .list_summary import ListSummary, join_sides

BUCKET_BYTES = 1 << 27  # of entries that are sorted at once
BUCKETS_PER_PIECE = 8
BUFFER_BYTES = 1 << 26  # of rows that wait to be written to their buckets
READ_ROWS = 1 << 16
ROWS_PER_COUNT = 1 << 22  # whose lists are counted at once
CHECKPOINT_ROWS = 1 << 22
COPY_BYTES = 1 << 24
PARTITION, PARTITIONED = "partition.tmp", "partitioned.json"
WRITING, WRITTEN = "lists.tmp", "written.json"


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


class ListWriter:
    """Writes the lists of one index; the caller holds the lock of its work folder."""

    def __init__(self, datastore: Datastore, ivf: faiss.IndexIVF, lists: FoundLists, work: Path):
        self._datastore, self._ivf, self._lists, self._work = datastore, ivf, lists, work
        self._record = record_dtype(ivf.code_size)
        sizes = np.zeros(ivf.nlist, np.int64)
        for start in range(0, len(lists), ROWS_PER_COUNT):
            sizes += np.bincount(lists.read(start, min(len(lists), start + ROWS_PER_COUNT)), minlength=ivf.nlist)
        self.starts = np.concatenate([[0], np.cumsum(sizes)])  # first row of each list
        self._first_lists = bucket_edges(self.starts, self._record.itemsize, BUCKET_BYTES)
        self._bucket_of_list = np.repeat(np.arange(len(self._first_lists) - 1), np.diff(self._first_lists))
        self._bucket_starts = self.starts[self._first_lists]  # first row of each bucket

    def write(self, path: Path) -> tuple[str, int]:
        """Write the whole index; its SHA-256, and how many bytes come before the lists."""
        self._partition()
        head = index_head(self._ivf, np.diff(self.starts))
        buckets = range(len(self._first_lists) - 1)
        pieces = [buckets[first : first + BUCKETS_PER_PIECE] for first in range(0, len(buckets), BUCKETS_PER_PIECE)]
        writing = self._work / WRITING
        try:
            descriptor = os.open(writing, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                sha256 = self._write_pieces(descriptor, head, pieces)
            finally:
                os.close(descriptor)
            system.rename(writing, path)
            system.fsync_folder(self._work)
        except OSError as error:
            raise write_failure(error, path) from error
        join_sides(self._work, self.starts, len(pieces))
        return sha256, len(head)

    def _write_pieces(self, descriptor: int, head: bytes, pieces: list[range]) -> str:
        """The head, and every list piece by piece, after those that an interrupted run has noted; the SHA-256."""
        note, row_bytes = self._work / WRITTEN, self._ivf.code_size + ID_BYTES
        done = read_json(note).get("pieces", 0) if note.exists() else 0
        done = done if isinstance(done, int) and 0 <= done <= len(pieces) else 0
        rows_done = int(self._bucket_starts[pieces[done - 1].stop]) if done else 0
        if os.fstat(descriptor).st_size < len(head) + rows_done * row_bytes:
            done = rows_done = 0
        os.ftruncate(descriptor, len(head) + rows_done * row_bytes if done else 0)
        digest = hashlib.sha256()
        for block in iter(lambda: os.read(descriptor, COPY_BYTES), b""):
            digest.update(block)

        def append(data: Any) -> None:
            view = memoryview(data).cast("B")
            system.write(descriptor, view)
            digest.update(view)

        if not done:
            append(head)
        with progress("writing lists", len(self._lists), " keys", rows_done) as bar:
            for piece, buckets in list(enumerate(pieces))[done:]:
                first, stop = int(self._first_lists[buckets.start]), int(self._first_lists[buckets.stop])
                summary = ListSummary(self._datastore, self._ivf, stop - first)
                for bucket in buckets:
                    rows = self._read_bucket(bucket)
                    rows["list"] -= first
                    lists = slice(self._first_lists[bucket], self._first_lists[bucket + 1] + 1)
                    starts = self.starts[lists] - self._bucket_starts[bucket]
                    summary.add(int(self._first_lists[bucket]) - first, rows, starts)
                    append(interleave(rows, starts, self._ivf.code_size))
                    bar.update(len(rows))
                    del rows  # before those of the next bucket are there
                system.fsync(descriptor)
                summary.write(self._work, piece)
                write_json(note, {"pieces": piece + 1})
        system.fsync(descriptor)
        return digest.hexdigest()

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
        for start in range(0, done, ROWS_PER_COUNT):
            some = self._lists.read(start, min(done, start + ROWS_PER_COUNT))
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
            lists = self._lists.read(start, start + len(block))
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
