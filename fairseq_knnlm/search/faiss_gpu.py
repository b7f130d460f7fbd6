"""FAISS indexes of other kinds than ours on a GPU, where the wheel and the index allow it."""

import logging

import faiss
import torch

logger = logging.getLogger(__name__)

MOST_NEIGHBORS = 2048  # that the classic GPU indexes of FAISS return


def to_gpu(index: faiss.Index, k: int, device: torch.device) -> faiss.Index:
    """The index on this device; or as it is, if it cannot go there, which is said.

    What it was told on the CPU (nprobe) goes with it: the GPU's classes have no common base that could be asked for it.
    """
    if device.type != "cuda":
        return index
    if not hasattr(faiss, "StandardGpuResources"):
        logger.info("this faiss has no GPU support (faiss-gpu has), so the index is searched on the CPU")
        return index
    if k > MOST_NEIGHBORS:
        logger.info(f"FAISS finds at most {MOST_NEIGHBORS:,} neighbours on a GPU, so the index is searched on the CPU")
        return index
    try:
        options = faiss.GpuClonerOptions()
        options.useFloat16 = True  # of the tables of product codes: 64 bytes per key do not fit in single precision
        return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), device.index or 0, index, options)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        logger.info(f"FAISS cannot bring this index to the GPU ({reason}), so it is searched on the CPU")
        return index
