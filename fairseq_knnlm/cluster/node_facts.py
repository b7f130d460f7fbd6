"""What a node knows of itself: its memory, its sockets, its software, and its copy of a datastore."""

import functools
import hashlib
import os
import re
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..datastore import Datastore
from ..errors import KnnlmError
from ..index.info import find_index
from ..machine import available_memory

COPIES = "KNNLM_COPIES"  # in the environment of a node: the folder that holds its own copies of datastores
SOCKETS = Path("/sys/devices/system/node")
BOOT = Path("/proc/sys/kernel/random/boot_id")


def own_copy(folder: str | Path) -> Path:
    """Where this node has the datastore that the driver calls ``folder``: there, too, or among its own copies."""
    copies = os.environ.get(COPIES)
    return Path(copies) / Path(folder).name if copies else Path(folder)


def own_facts(folder: str | None = None, index: str | None = None) -> dict[str, Any]:
    """Everything that the driver asks a node for; plain values only, since it may have another release of us."""
    from .. import __version__

    facts: dict[str, Any] = {
        "package": __version__,
        "source": source_digest(),
        "memory": available_memory(),
        "sockets": sockets(),
        "gpu_memory": _gpu_memory(),
        "machine": f"{socket.gethostname()} {_read(BOOT)}",
    }
    if folder is not None:
        facts |= datastore_facts(own_copy(folder), index)
    return facts


def datastore_facts(folder: Path, index: str | None) -> dict[str, Any]:
    """What a copy of a datastore and its index is, as their checksums tell; or the sentence that says what is wrong."""
    try:
        datastore = Datastore(folder)
        info = None if index is None else find_index(datastore, index)
    except (KnnlmError, OSError) as error:
        return {"folder": str(folder), "problem": str(error)}
    facts = {"folder": str(folder), "keys": datastore.fingerprint, "index": None if info is None else asdict(info)}
    if index is not None and info is None:
        facts["problem"] = f"{folder} has no whole index {index}"
    return facts


@functools.cache
def source_digest() -> str:
    """A checksum of the package's own source: two checkouts of one version may differ."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parent.parent
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def sockets() -> list[list[int]]:
    """The processors of each socket (NUMA node) that this process may use."""
    allowed = os.sched_getaffinity(0)
    found = []
    for path in sorted(SOCKETS.glob("node[0-9]*/cpulist")):
        processors = sorted(parse_processors(_read(path)) & allowed)
        if processors:
            found.append(processors)
    return found or [sorted(allowed)]


def parse_processors(text: str) -> set[int]:
    """The numbers of the system's notation: "0-2,8" are 0, 1, 2 and 8."""
    ranges = [tuple(map(int, part.split("-"))) for part in re.findall(r"\d+(?:-\d+)?", text)]
    return {number for part in ranges for number in range(part[0], part[-1] + 1)}


def _gpu_memory() -> list[int]:
    import torch

    return [torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count())]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
