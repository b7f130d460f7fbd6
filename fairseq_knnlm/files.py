"""Writing files so that nothing is ever half there: temporary name, flush to disk, rename."""

import errno
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

from .errors import KnnlmError

READ_AHEAD_BYTES = 1 << 20


def write_json(path: Path, content: Any) -> None:
    """Write JSON to path atomically."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with open(temporary, "w") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """Read JSON; a damaged file is the user's to mend."""
    try:
        return json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise KnnlmError(f"{path} is damaged ({error}); delete its folder and make it again") from error


def read_versioned(path: Path, format: str, version: int, remedy: str) -> dict[str, Any]:
    """Read the JSON that describes a folder of ours; ``format`` ends in what it is."""
    folder, what = path.parent, format.split()[-1]
    if not path.exists():
        raise KnnlmError(f"{folder} is not a {what} (no {path.name}); {remedy}")
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != format:
        raise KnnlmError(f"{path} does not describe a {what}; {remedy}")
    if content.get("version") != version:
        raise KnnlmError(
            f"{folder} has format version {content.get('version')}, but this fairseq-knnlm reads version {version}; "
            f"{remedy} again, or use the release that wrote it"
        )
    return content


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_ahead(path: Path) -> None:
    """Let the system read a file into its cache, in the background.

    A mapped file that is not there yet comes page by page, as it is touched: ten times as slow as a disk can read.
    """

    def advise() -> None:
        with open(path, "rb") as file:
            for start in range(0, os.fstat(file.fileno()).st_size, READ_AHEAD_BYTES):  # no call does more than that
                os.posix_fadvise(file.fileno(), start, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)

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


def disk_full(error: OSError, path: Path) -> KnnlmError:
    """The sentence for a write that failed because the disk or the quota is full (other errors are re-raised)."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise error
    return KnnlmError(f"the disk is full: {path} could not be written; free some space and run the same command again")
