"""Which queries visit which list."""

import numpy as np


def group_by_list(lists: np.ndarray, nlist: int) -> dict[int, np.ndarray]:
    """From the lists that each query visits (n, nprobe), -1 for none, to the queries (r,) of each visited list.

    Lists come in ascending order, as they stand in the file.
    """
    flat = np.where(lists < 0, nlist, lists).ravel()  # -1 (no list) becomes the last number
    order = stable_order(flat)
    ends = np.bincount(flat, minlength=nlist + 1).cumsum()
    rows = order // max(1, lists.shape[1])
    begins = np.concatenate([[0], ends[:-1]])
    return {int(n): rows[begins[n] : ends[n]] for n in np.flatnonzero(ends[:-1] > begins[:-1])}


def stable_order(numbers: np.ndarray) -> np.ndarray:
    """As a stable argsort of numbers below 2^32. NumPy sorts 16 bits by radix, ten times as fast as more."""
    order = np.argsort((numbers & 0xFFFF).astype(np.uint16), kind="stable")
    if len(numbers) and numbers.max() > 0xFFFF:
        order = order[np.argsort((numbers[order] >> 16).astype(np.uint16), kind="stable")]
    return order
