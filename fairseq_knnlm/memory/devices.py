"""Where the search runs."""

import logging
from collections.abc import Sequence

import torch

from ..errors import KnnlmError
from ..index import IndexInfo
from ..machine import gpu_memory, parse_device

logger = logging.getLogger(__name__)

SHARE_FOR_LISTS = 0.6  # of the memory that is free on a GPU; the rest is for the model, queries and distances
CPU = torch.device("cpu")


def choose_devices(wanted: str, model: torch.device, info: IndexInfo | None) -> list[torch.device]:
    """The devices of a ``--knn-device``.

    Args:
        wanted: auto, cpu, cuda or cuda:N, or several GPUs (cuda:0,cuda:1), each of which has a range of the lists; auto
            is the model's GPU if it has one and the index fits into it
        info: the index; None: every key is read, on the CPU
    """
    if wanted == "auto":
        if model.type != "cuda" or info is None:
            return [CPU]
        fits = lists_stay_on([model], info)
        if not fits:
            logger.info(f"the index {info.name} does not fit into the memory of {model}, so the search runs on the CPU")
        return [model if fits else CPU]
    devices = [parse_device(word) for word in wanted.split(",")]
    if len(set(devices)) < len(devices) or (len(devices) > 1 and CPU in devices):
        raise KnnlmError(f"--knn-device takes several GPUs once each, as in cuda:0,cuda:1, not '{wanted}'")
    if devices != [CPU] and (info is None or info.factory is None):
        logger.info("exact search reads every key and runs on the CPU, whatever --knn-device says")
        return [CPU]
    return devices


def lists_stay_on(devices: Sequence[torch.device | str], info: IndexInfo) -> bool:
    """Whether the lists of an index fit into the memory of these GPUs together; else they are read for each search."""
    gpus = [torch.device(device) for device in devices]
    if any(gpu.type != "cuda" for gpu in gpus):
        return False
    return all(info.bytes / len(gpus) <= SHARE_FOR_LISTS * gpu_memory(gpu) for gpu in gpus)


def search_precision(model_dtype: torch.dtype, devices: Sequence[torch.device]) -> torch.dtype:
    """Half precision for a model in half precision (--fp16) where the search runs on GPUs; else single precision.

    On a CPU products of half precision are slower than of single precision.
    """
    on_gpus = all(device.type == "cuda" for device in devices)
    return torch.float16 if model_dtype == torch.float16 and on_gpus else torch.float32
