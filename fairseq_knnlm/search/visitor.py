"""What ``ListSearch`` asks whoever owns some lists, here or in another process; and how lists are shared out."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..index.list_files import SortedLists
from .list_blocks import Lists
from .masses import Masses

Found = tuple[np.ndarray, np.ndarray, np.ndarray]  # distances (r, k), ids (r, k), whether each row is right (r,)
VisitedMasses = tuple[np.ndarray, np.ndarray, np.ndarray]  # values (m,), log masses (m,), log mass of each list


class Visitor(Protocol):
    """The owner of some lists."""

    lists: Lists
    device: torch.device

    def masses(
        self,
        vectors: Tensor,
        targets: np.ndarray,
        near: np.ndarray,
        temperatures: list[float],
        keep_mean: bool,
        keep_ranks: bool = False,
    ) -> Masses: ...

    def nearest(self, vectors: Tensor, near: np.ndarray, k: int, max_samples: int) -> Iterator[Found]: ...

    def visited(self, vector: Tensor, near: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...

    def visited_masses(self, vector: Tensor, near: np.ndarray, scale: float) -> VisitedMasses: ...


def list_ranges(lists: SortedLists, parts: int) -> list[tuple[int, int]]:
    """Cut all lists into contiguous ranges of about as many entries each: first list, and the one after the last."""
    return cut_evenly(lists.file.starts, np.ones(parts))


def cut_evenly(ends: np.ndarray, shares: np.ndarray) -> list[tuple[int, int]]:
    """Cut lists into contiguous ranges whose costs are as these shares (parts,) are to each other.

    Args:
        ends: (lists + 1,) the cost of all lists before each list, and of all of them
    """
    edges = np.searchsorted(ends, ends[-1] * np.cumsum(shares)[:-1] / np.sum(shares))
    return list(pairwise([0, *edges.tolist(), len(ends) - 1]))
