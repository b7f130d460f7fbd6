"""One sentence, with the remedy, for each way in which the system can refuse to read or write."""

import errno
from pathlib import Path

from ..errors import KnnlmError

AGAIN = "then run the same command again"


def write_failure(error: OSError, path: Path) -> KnnlmError:
    """Why ``path`` cannot be written."""
    reasons = {
        errno.ENOSPC: f"the disk is full; free some space, {AGAIN}",
        errno.EDQUOT: f"your disk quota is full; free some space or ask for more, {AGAIN}",
        errno.EIO: f"the disk reports an error; check the disk, {AGAIN}",
        errno.EACCES: "you have no permission to write there; choose another folder",
        errno.EPERM: "you have no permission to write there; choose another folder",
        errno.EROFS: "the file system is read-only; choose another folder",
        errno.ENOTDIR: "a part of this path is a file, not a folder; choose another folder",
        errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
        errno.EMFILE: f"too many files are open; raise the limit with ulimit -n, {AGAIN}",
        errno.ENFILE: f"the system has too many files open; close some programs, {AGAIN}",
    }
    reason = reasons.get(error.errno or 0, f"{error.strerror or error}; solve that, {AGAIN}")
    return KnnlmError(f"{path} cannot be written: {reason}")


def read_failure(error: OSError, path: Path) -> KnnlmError:
    """Why ``path`` cannot be read. The file may be sound, so the sentence never advises to delete it."""
    reasons = {
        errno.ENOENT: "it does not exist; check the path",
        errno.EACCES: "you have no permission to read it; ask its owner",
        errno.EMFILE: f"too many files are open; raise the limit with ulimit -n, {AGAIN}",
        errno.ENFILE: f"the system has too many files open; close some programs, {AGAIN}",
        errno.ENAMETOOLONG: "the name is too long; check the path",
        errno.EIO: "the disk reports an error; check the disk, or restore the file from a copy",
        errno.ENOMEM: f"there is not enough memory; free some, {AGAIN}",
        errno.EISDIR: "it is a folder, not a file; check the path",
        errno.ENOTDIR: "a part of this path is a file, not a folder; check the path",
    }
    reason = reasons.get(error.errno or 0, f"{error.strerror or error}; solve that, {AGAIN}")
    return KnnlmError(f"{path} cannot be read: {reason}")
