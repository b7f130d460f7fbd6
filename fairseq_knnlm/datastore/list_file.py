"""Inverted lists in the file of a FAISS index, read without FAISS: one list after the other, codes, then ids.

FAISS writes a plain IVF index as a head (centroids, quantizer, the size of every list) and then, for each list that is
not empty, its codes and its ids (int64). So the place of everything follows from the sizes, and lists that stand side
by side are one plain read, which a disk does ten times as fast as the page by page of a mapped file.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import KnnlmError
from ..storage.faults import read_failure

ID_BYTES = 8


@dataclass
class ListFile:
    """Where the lists of an index file are."""

    path: Path
    head_bytes: int
    code_bytes: int  # of one entry
    starts: np.ndarray  # (lists + 1,) int64: the first row of each list; rows are counted through all lists

    def __post_init__(self) -> None:
        self._descriptor = -1
        self._owner = os.getpid()

    @property
    def row_bytes(self) -> int:
        return self.code_bytes + ID_BYTES

    def offset(self, number: int) -> int:
        """Where a list begins, in bytes."""
        return self.head_bytes + int(self.starts[number]) * self.row_bytes

    def read(self, first: int, last: int) -> np.ndarray:
        """The bytes of the lists [first, last), in one read."""
        return self._read_bytes(self.offset(first), self.offset(last) - self.offset(first))

    def split(self, data: np.ndarray, first: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Codes (m, code bytes) and ids (m,) of list ``number`` in the bytes that ``read(first, ...)`` returned."""
        rows = int(self.starts[number + 1] - self.starts[number])
        begin = self.offset(number) - self.offset(first)
        middle = begin + rows * self.code_bytes
        codes = data[begin:middle].reshape(rows, self.code_bytes)
        return codes, data[middle : middle + rows * ID_BYTES].view(np.int64)

    def ids(self) -> np.ndarray:
        """The ids of all lists, in the order of the rows: (entries,)."""
        ids = np.empty(int(self.starts[-1]), np.int64)
        for number, (start, stop) in enumerate(zip(self.starts[:-1].tolist(), self.starts[1:].tolist())):
            begin = self.offset(number) + (stop - start) * self.code_bytes
            ids[start:stop] = self._read_bytes(begin, (stop - start) * ID_BYTES).view(np.int64)
        return ids

    def codes(self, rows: np.ndarray) -> np.ndarray:
        """The codes of some rows, in any order: (n,) -> (n, code bytes)."""
        lists = np.searchsorted(self.starts, rows, side="right") - 1
        before = self.starts[lists]
        offsets = self.head_bytes + before * self.row_bytes + (rows - before) * self.code_bytes
        codes = np.empty((len(rows), self.code_bytes), np.uint8)
        for place, offset in enumerate(offsets.tolist()):
            codes[place] = self._read_bytes(offset, self.code_bytes)
        return codes

    def will_need(self, numbers: np.ndarray) -> None:
        """Let the system read these lists into its cache, where they are not there yet."""
        if hasattr(os, "posix_fadvise"):  # not on every system
            for number in numbers.tolist():
                begin = self.offset(number)
                count = self.offset(number + 1) - begin
                os.posix_fadvise(self._open(), begin, count, os.POSIX_FADV_WILLNEED)

    def _open(self) -> int:
        """The file's descriptor."""
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptor

    def _read_bytes(self, offset: int, count: int) -> np.ndarray:
        data = np.empty(count, np.uint8)
        view, done = data.data, 0
        try:
            while done < count:
                got = os.preadv(self._open(), [view[done:]], offset + done)
                if got == 0:
                    raise KnnlmError(f"{self.path} was truncated while it was in use; build the index again")
                done += got
        except OSError as error:
            raise read_failure(error, self.path) from error
        return data

    def close(self) -> None:
        if self._descriptor >= 0 and os.getpid() == self._owner:
            os.close(self._descriptor)
        self._descriptor = -1

    def __del__(self) -> None:
        self.close()


class KeysInLists:
    """The keys of a datastore whose only copy is in the lists of an index; answers what ``ShardedArray`` answers."""

    def __init__(self, lists: ListFile, dim: int, dtype: str):
        self._lists, self._shape, self._dtype = lists, dim, np.dtype(dtype)
        self._rows: np.ndarray | None = None

    def __len__(self) -> int:
        return int(self._lists.starts[-1])

    @property
    def nbytes(self) -> int:
        return 0  # they are counted with the index

    def gather(self, ids: np.ndarray) -> np.ndarray:
        """The keys of the given entries, in any order: (n,) -> (n, dim)."""
        if self._rows is None:
            self._rows = self._find_rows()
        rows = self._rows[ids]
        order = np.argsort(rows)  # a disk likes to go one way
        keys = np.empty((len(ids), self._lists.code_bytes), np.uint8)
        keys[order] = self._lists.codes(rows[order])
        return from_codes(keys, self._dtype).reshape(len(ids), self._shape)

    def _find_rows(self) -> np.ndarray:
        """The row of every entry: 4 bytes per entry in memory."""
        ids = self._lists.ids()
        rows = np.empty(len(ids), np.min_scalar_type(len(ids)))
        rows[ids] = np.arange(len(ids), dtype=rows.dtype)
        return rows

    def blocks(self, rows: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        stop = len(self) if stop is None else stop
        for first in range(start, stop, rows):
            yield self.gather(np.arange(first, min(first + rows, stop)))


def to_codes(keys: np.ndarray) -> np.ndarray:
    """Stored keys (n, dim) as FAISS's codes (n, bytes): 8-bit numbers are unsigned there."""
    data: np.ndarray[Any, Any] = np.ascontiguousarray(keys).view(np.uint8).reshape(len(keys), -1)
    return data ^ np.uint8(128) if keys.dtype == np.int8 else data


def from_codes(codes: np.ndarray, dtype: np.dtype | str) -> np.ndarray:
    """FAISS's codes (n, bytes) as stored keys (n, dim)."""
    if np.dtype(dtype) == np.int8:
        return (codes ^ np.uint8(128)).view(np.int8)
    return np.ascontiguousarray(codes).view(dtype)
