"""The raw files of the original implementation: an array without a header, of which only the size is known."""

import hashlib
from pathlib import Path

import numpy as np

from ..errors import KnnlmError
from ..storage.faults import read_failure

BLOCK = 1 << 16
SPREAD_BLOCKS = 64


class DamagedStoreError(KnnlmError):
    """The raw files hold what no datastore holds, so an import of them can never be finished."""


class RawFile:
    """A file that is read with a dtype and a width of the caller's choice."""

    def __init__(self, path: Path):
        if not path.is_file():
            raise KnnlmError(f"{path} does not exist; give the prefix of ..._keys.npy and ..._vals.npy")
        self.path, self.bytes = path, path.stat().st_size
        self._used_bytes: int | None = None

    def rows(self, dtype: str, width: int, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) as (stop - start, width), read and not mapped, so that they are no one's memory later."""
        count = (stop - start) * width
        try:
            with open(self.path, "rb") as file:
                file.seek(start * width * np.dtype(dtype).itemsize)
                block = np.fromfile(file, dtype, count)
        except OSError as error:
            raise read_failure(error, self.path) from error
        if len(block) != count:
            raise KnnlmError(f"{self.path} was truncated while it was read; restore it and run the same command again")
        return block.reshape(-1, width)

    def some_rows(self, dtype: str, width: int, numbers: np.ndarray) -> np.ndarray:
        """The rows of the given numbers, (n,) -> (n, width)."""
        shape = (self.bytes // np.dtype(dtype).itemsize // width, width)
        try:
            return np.memmap(self.path, dtype, "r", shape=shape)[numbers]
        except OSError as error:
            raise read_failure(error, self.path) from error

    def used_bytes(self) -> int:
        """Where the last byte that is not zero ends.

        The original allocates its files at the size that was typed, so a dump that ended early ends in zeros. They can
        be most of the file, so their beginning is found by bisection.
        """
        if self._used_bytes is None:
            low, high = 0, -(-self.bytes // BLOCK)  # blocks before low hold numbers, blocks from high on hold none
            if high and self._block(high - 1).any():
                low = high
            while low < high:
                middle = (low + high) // 2
                low, high = (middle + 1, high) if self._block(middle).any() else (low, middle)
            last = np.flatnonzero(self._block(low - 1)) if low else np.empty(0, np.int64)
            self._used_bytes = (low - 1) * BLOCK + int(last[-1]) + 1 if len(last) else 0
        return self._used_bytes

    def is_used_after(self, start: int) -> bool:
        """Whether a sample of the blocks behind a byte holds anything, as behind a hole in the middle of a file."""
        return any(self._block(number).any() for number in self._spread(-(-start // BLOCK)))

    def update(self, digest: "hashlib._Hash") -> None:
        """Add the size and a sample of the content to a checksum."""
        digest.update(f"{self.bytes} ".encode())
        for number in self._spread(0):
            digest.update(self._block(number).tobytes())

    def _spread(self, first: int) -> list[int]:
        """Numbers of 64 blocks, evenly spread over the file from a block on."""
        last = -(-self.bytes // BLOCK) - 1
        return np.unique(np.linspace(first, last, SPREAD_BLOCKS).astype(int)).tolist() if first <= last else []

    def _block(self, number: int) -> np.ndarray:
        start = number * BLOCK
        return self.rows("uint8", 1, start, min(start + BLOCK, self.bytes))[:, 0]


def fingerprint(*files: RawFile) -> str:
    """What tells one store from another of the same name: sizes, and a SHA-256 over blocks spread over each file."""
    digest = hashlib.sha256()
    for file in files:
        file.update(digest)
    return digest.hexdigest()


def check_keys(path: Path, keys: np.ndarray, first: int) -> None:
    """Refuse rows that no model makes: keys (n, dim), of which the first is row ``first`` of the file."""
    broken = np.flatnonzero(~np.isfinite(keys).all(axis=1))
    if len(broken):
        row = first + int(broken[0])
        raise DamagedStoreError(
            f"row {row} of {path} holds NaN or infinite numbers; dump it again (in float32 if the states are too large "
            f"for float16){_or_before(row)}"
        )
    empty = np.flatnonzero(~keys.any(axis=1))
    if len(empty):
        raise zero_row(path, first + int(empty[0]))


def zero_row(path: Path, row: int) -> DamagedStoreError:
    return DamagedStoreError(
        f"row {row} of {path} is all zeros, so the dump is damaged or was interrupted; dump it again{_or_before(row)}"
    )


def _or_before(row: int) -> str:
    return f", or use --size {row} to import the rows before" if row else ""
