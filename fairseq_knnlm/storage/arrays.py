"""Arrays in .npy files: checked before use, and several files as one array without keeping all of them open."""

import resource
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import KnnlmError
from .faults import read_failure


def check_array_file(
    path: Path, shape: tuple[int, ...], dtype: str, remedy: str, record: str = "its record"
) -> int:
    """Refuse a file whose header or size is not that of such an array; where its data begins, in bytes.

    Args:
        remedy: for a damaged file; a file that cannot be opened for another reason gets a sentence of its own
        record: what tells the shape
    """
    try:
        with open(path, "rb") as file:
            found_shape, found_dtype, offset = _read_header(file)
            size = file.seek(0, 2)
    except FileNotFoundError as error:
        raise KnnlmError(f"{path} is missing; {remedy}") from error
    except OSError as error:
        raise read_failure(error, path) from error
    except Exception as error:  # a damaged header can make NumPy raise nearly anything
        raise KnnlmError(f"{path} is truncated or damaged ({' '.join(str(error).split())}); {remedy}") from error
    if found_shape != shape or found_dtype != np.dtype(dtype):
        raise KnnlmError(f"{path} holds {found_dtype} {found_shape} but {record} says {dtype} {shape}; {remedy}")
    expected = offset + int(np.prod(shape, dtype=np.int64)) * found_dtype.itemsize
    if size != expected:
        raise KnnlmError(f"{path} is truncated or damaged ({size:,} bytes instead of {expected:,}); {remedy}")
    return offset


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype, int]:
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"version {version} of the format")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran:
        raise ValueError("columns before rows")
    return shape, dtype, file.tell()


def map_array(path: Path, shape: tuple[int, ...], dtype: str, remedy: str) -> np.ndarray:
    """A checked array, mapped; an empty one cannot be."""
    offset = check_array_file(path, shape, dtype, remedy)
    if 0 in shape:
        return np.empty(shape, dtype)
    try:
        return np.memmap(path, dtype, "r", offset, shape)
    except OSError as error:
        raise read_failure(error, path) from error


class ShardedArray:
    """Consecutive .npy files as one array. Files are opened when they are used, and not all stay open.

    A mapped file holds a file descriptor, of which a process often has 1,024; a large datastore has 400 shards of two
    files each.
    """

    def __init__(
        self, folder: Path, names: list[str], rows: list[int], row_shape: tuple[int, ...], dtype: str, remedy: str,
        record: str = "its record",
    ):  # fmt: skip
        """
        Args:
            rows: of each file
            row_shape: of one row: () or (dim,)
            remedy: what to do about a damaged file
            record: what tells the rows
        """
        self._folder, self._names, self._rows = folder, names, rows
        self._row_shape, self._dtype, self._remedy = row_shape, np.dtype(dtype), remedy
        self._starts = np.cumsum([0, *rows])
        self._offsets = [
            check_array_file(folder / name, (count, *row_shape), dtype, remedy, record)
            for name, count in zip(names, rows)
        ]
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._map = lru_cache(maxsize=max(4, limit // 8))(self._map_file)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def nbytes(self) -> int:
        return len(self) * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return int(np.prod(self._row_shape, dtype=np.int64)) * self._dtype.itemsize

    def _map_file(self, number: int) -> np.ndarray:
        path, shape = self._folder / self._names[number], (self._rows[number], *self._row_shape)
        try:
            return np.memmap(path, self._dtype, "r", self._offsets[number], shape)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                raise read_failure(error, path) from error
            raise KnnlmError(f"{path} was truncated while it was in use; {self._remedy}") from error

    def gather(self, ids: np.ndarray) -> np.ndarray:
        """The rows of the given numbers, in any order: (n,) -> (n, ...)."""
        rows = np.empty((len(ids), *self._row_shape), self._dtype)
        file_of = np.searchsorted(self._starts, ids, side="right") - 1
        for number in np.unique(file_of):
            places = np.flatnonzero(file_of == number)
            rows[places] = self._map(int(number))[ids[places] - self._starts[number]]
        return rows

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop), in memory."""
        parts = list(self.blocks(max(1, stop - start), start, stop))
        return np.concatenate(parts) if parts else np.empty((0, *self._row_shape), self._dtype)

    def blocks(self, rows: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """Stream rows [start, stop) in order, at most ``rows`` at once and of one file each.

        They are read, not mapped: mapped pages would count as memory of this process until the system needs them.
        """
        stop = len(self) if stop is None else stop
        for number, first in enumerate(self._starts[:-1].tolist()):
            low, high = max(start - first, 0), min(stop - first, self._rows[number])
            if low < high:
                yield from self._read_file(number, low, high, rows)

    def _read_file(self, number: int, low: int, high: int, rows: int) -> Iterator[np.ndarray]:
        path, width = self._folder / self._names[number], int(np.prod(self._row_shape, dtype=np.int64))
        try:
            with open(path, "rb") as file:
                file.seek(self._offsets[number] + low * self._row_bytes)
                for row in range(low, high, rows):
                    count = min(rows, high - row)
                    block = np.fromfile(file, self._dtype, count * width)
                    if len(block) != count * width:
                        raise KnnlmError(f"{path} was truncated while it was in use; {self._remedy}")
                    yield block.reshape(count, *self._row_shape)
        except OSError as error:
            raise read_failure(error, path) from error
