"""Where the search runs."""

import logging

import torch

from ..errors import KnnlmError
from ..index import IndexInfo
from ..machine import gpu_memory

logger = logging.getLogger(__name__)

SHARE_FOR_LISTS = 0.6  # of the memory that is free on a GPU; the rest is for the model, queries and distances


def choose_device(wanted: str, model: torch.device, info: IndexInfo | None) -> torch.device:
    """The device of a ``--knn-device``.

    Args:
        wanted: auto, cpu, cuda or cuda:N; auto is the model's GPU if it has one and the index fits into it
        info: the index; None: every key is read, on the CPU
    """
    if wanted == "auto":
        if model.type != "cuda" or info is None:
            return torch.device("cpu")
        fits = info.bytes <= SHARE_FOR_LISTS * gpu_memory(model)
        if not fits:
            logger.info(f"the index {info.name} does not fit into the memory of {model}, so the search runs on the CPU")
        return model if fits else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise KnnlmError(f"--knn-device takes auto, cpu, cuda or cuda:N, not '{wanted}'") from error
    if device.type not in ("cpu", "cuda"):
        raise KnnlmError(f"--knn-device takes auto, cpu, cuda or cuda:N, not '{wanted}'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise KnnlmError(
            f"--knn-device {wanted} is not there: this machine has {count or 'no'} GPU{'s' if count > 1 else ''} that "
            "torch can use; use --knn-device cpu"
        )
    if device.type == "cuda" and (info is None or info.factory is None):
        logger.info("exact search reads every key and runs on the CPU, whatever --knn-device says")
        return torch.device("cpu")
    return device
