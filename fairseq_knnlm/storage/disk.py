"""What a disk holds and can hold."""

import hashlib
import os
import shutil
import threading
from pathlib import Path

from ..errors import KnnlmError
from .faults import read_failure, write_failure

READ_AHEAD_BYTES = 1 << 20
HASH_BLOCK = 1 << 20


def file_sha256(path: Path, size: int | None = None) -> str:
    """The SHA-256 of a file, or of its first ``size`` bytes."""
    digest = hashlib.sha256()
    left = path.stat().st_size if size is None else size
    try:
        with open(path, "rb") as file:
            while left > 0 and (block := file.read(min(left, HASH_BLOCK))):
                digest.update(block)
                left -= len(block)
    except OSError as error:
        raise read_failure(error, path) from error
    return digest.hexdigest()


def read_ahead(path: Path, first: int = 0, count: int | None = None) -> None:
    """Let the system read a file, or ``count`` bytes from ``first`` on, into its cache, in the background.

    A mapped file that is not there yet comes page by page, as it is touched: ten times as slow as a disk can read.
    """

    def advise() -> None:
        with open(path, "rb") as file:
            stop = os.fstat(file.fileno()).st_size if count is None else first + count
            for start in range(first, stop, READ_AHEAD_BYTES):  # no call does more than that
                os.posix_fadvise(file.fileno(), start, min(READ_AHEAD_BYTES, stop - start), os.POSIX_FADV_WILLNEED)

    if hasattr(os, "posix_fadvise"):  # not on every system
        threading.Thread(target=advise, daemon=True).start()


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def check_disk_space(folder: Path, needed: int, purpose: str) -> None:
    """Fail before the work starts when the disk cannot hold its result."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise KnnlmError(
            f"{purpose} needs {human_bytes(needed)} but {folder} has {human_bytes(free)} free; "
            "free some space or choose a folder on another disk"
        )


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, if they are missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise KnnlmError(f"{folder} is a file, not a folder; choose another folder") from error
    except OSError as error:
        raise write_failure(error, folder) from error
