"""What this process may use of the machine."""

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import KnnlmError

if TYPE_CHECKING:
    import torch

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
OWN_STATUS = Path("/proc/self/status")
PROCESSOR = Path("/proc/cpuinfo")


def available_memory() -> int:
    """In bytes: the least of what the system, the control group (Docker, Slurm) and ``ulimit -v`` leave.

    What the system keeps of files counts as available, since it gives that up when asked to.
    """
    limits = [_system_memory(), *_cgroup_memory()]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    return max(0, min(limits))


def processor_vendor() -> str:
    """Who made the processor, as it says itself ("GenuineIntel", "AuthenticAMD"); empty where that is not known."""
    try:
        with open(PROCESSOR) as file:
            return next((line.split(":")[1].strip() for line in file if line.startswith("vendor_id")), "")
    except OSError:  # another system than Linux
        return ""


def gpu_memory(device: "torch.device") -> int:
    """Free memory of a GPU, in bytes. The one place that is asked, so that a test can answer."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return free


def parse_device(word: str, flag: str = "--knn-device") -> "torch.device":
    """The CPU or a GPU by its name in torch, if it is there."""
    import torch

    remedy = f"{flag} takes auto, cpu, cuda or cuda:N, or several GPUs as in cuda:0,cuda:1"
    try:
        device = torch.device(word.strip())
    except RuntimeError as error:
        raise KnnlmError(f"{remedy}, not '{word}'") from error
    if device.type not in ("cpu", "cuda"):
        raise KnnlmError(f"{remedy}, not '{word}'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise KnnlmError(
            f"{flag} {word} is not there: this machine has {count or 'no'} GPU{'s' if count > 1 else ''} that torch "
            f"can use; use {flag} cpu"
        )
    return device


def building_device(wanted: str, model: "torch.device | None" = None, flag: str = "--knn-device") -> "torch.device":
    """Where an index is built: the first of the devices that are asked for; auto: where the model is, or the CPU."""
    if wanted == "auto":
        return model if model is not None else parse_device("cpu")
    return parse_device(wanted.split(",")[0], flag)


def peak_memory() -> int:
    """The most memory that this process has used, in bytes; pages of files that it mapped count, too."""
    try:
        with open(OWN_STATUS) as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):  # another system than Linux; it may count what our parent used
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _system_memory() -> int:
    try:
        with open(MEMINFO) as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # another system than Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_memory() -> list[int]:
    """What each limit on the way from our control group to the root leaves."""
    left = []
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one tree
            root, limit, usage, cache = CGROUPS, "memory.max", "memory.current", ("active_file", "inactive_file")
        elif "memory" in controllers.split(","):
            root, limit, usage = CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = ("total_active_file", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        # Inside a container the path may be the host's; then the limits stand at the root of what we see.
        for place in (folder, *folder.parents):
            if place == root.parent:
                break
            if (number := _read_number(place / limit)) is not None:
                left.append(number - (_read_number(place / usage) or 0) + _file_cache(place / "memory.stat", cache))
    return left


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max": no limit
        return None


def _file_cache(path: Path, names: tuple[str, ...]) -> int:
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
        return sum(int(row[1]) for row in rows if row[0] in names)
    except (OSError, ValueError, IndexError):
        return 0
