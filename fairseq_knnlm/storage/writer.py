"""The one writer: a temporary name, write, fsync, rename, fsync of the folder."""

import fcntl
import hashlib
import json
import math
import os
import re
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from . import system
from .faults import write_failure

TEMPORARY = re.compile(r".+\.[0-9a-f]{12}\.tmp")
# that a killed holder did not remove
LOCK = re.compile(r"(manifest\.json|positions\.npy|tuned\.json|shard-\d{5})\.lock")


class OutputFile:
    """A file under a temporary name; ``commit`` makes it appear under its own, ``abort`` drops it.

    The writes are unbuffered, so a full disk is an error of the write that met it. The temporary name is random,
    because process numbers repeat between containers that share a disk, and the file is locked while it is open:
    a temporary file that nobody holds a lock on was left by a killed process.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._descriptor, self._owner = -1, os.getpid()
        self._digest = hashlib.sha256()
        try:
            self._open()
        except OSError as error:
            raise write_failure(error, self.path) from error

    def _open(self) -> None:
        while True:
            self.temporary = self.path.with_name(f"{self.path.name}.{secrets.token_hex(6)}.tmp")
            self._descriptor = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass  # another process has taken the file, not locked yet, for a left-over, and removes it
            except OSError:
                return  # a file system without locks: then nobody removes left-overs either
            else:
                if os.fstat(self._descriptor).st_nlink:  # or it was removed between the two calls
                    return
            os.close(self._descriptor)

    def write(self, data: Any) -> int:
        """Append bytes or a contiguous array; the number of bytes, as files return it."""
        view = memoryview(data)
        if view.nbytes == 0:
            return 0
        view = view.cast("B")
        try:
            system.write(self._descriptor, view)
        except OSError as error:
            self.abort()
            raise write_failure(error, self.path) from error
        self._digest.update(view)
        return view.nbytes

    def write_array_header(self, shape: tuple[int, ...], dtype: str) -> None:
        """Begin a .npy file whose rows follow in any number of writes."""
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self, header)

    @property
    def sha256(self) -> str:
        """Of what has been written so far."""
        return self._digest.hexdigest()

    def commit(self) -> str:
        """Make the file appear, durably; its SHA-256."""
        try:
            system.fsync(self._descriptor)
            system.rename(self.temporary, self.path)
            system.fsync_folder(self.path.parent)
        except OSError as error:
            self.abort()
            raise write_failure(error, self.path) from error
        self._close()
        return self.sha256

    def abort(self) -> None:
        """Drop what was written; whatever stood under the file's own name stays."""
        self.temporary.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        # Nobody can commit it any more. A forked process has a copy of this object, but the file is its parent's.
        if self._descriptor >= 0 and os.getpid() == self._owner:
            self.abort()

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._descriptor >= 0:
            if kind is None:
                self.commit()
            else:
                self.abort()


def write_text(path: str | Path, text: str) -> None:
    """Write text as UTF-8."""
    with OutputFile(path) as file:
        file.write(text.encode())


def plain(content: Any) -> Any:
    """The same with infinite numbers as "inf" and "-inf", and "nan": JSON has no such numbers, and browsers fail."""
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    if isinstance(content, dict):
        return {name: plain(value) for name, value in content.items()}
    return [plain(value) for value in content] if isinstance(content, list | tuple) else content


def to_json(content: Any, indent: int | None = None) -> str:
    """JSON that every reader understands."""
    return json.dumps(plain(content), indent=indent, allow_nan=False)


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON with an indentation that people can read."""
    write_text(path, to_json(content, indent=1) + "\n")


def write_array(path: str | Path, array: np.ndarray) -> str:
    """Write a .npy file; its SHA-256."""
    file = OutputFile(path)
    file.write_array_header(array.shape, array.dtype.str)
    file.write(np.ascontiguousarray(array))
    return file.commit()


def remove_stale_files(folder: Path) -> None:
    """Remove the temporary files and the locks that killed processes left in a folder, and no others."""
    for path in folder.iterdir():
        if (TEMPORARY.fullmatch(path.name) or LOCK.fullmatch(path.name)) and path.is_file():
            try:
                with open(path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer or holder lives
                    # A lock may have been freed and taken anew since it was opened: then this is a file without a
                    # name, and the name is that of a lock in use.
                    if os.fstat(file.fileno()).st_nlink:
                        path.unlink(missing_ok=True)
            except OSError:
                continue
