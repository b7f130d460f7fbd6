"""The share that a query's target has of the entries of lists which nobody reads, from what stands beside an index."""

import numpy as np
import torch
from torch import Tensor

from ..index.list_files import SortedLists
from ..parallel import for_each
from .visits import stable_order

PLACES_AT_ONCE = 1 << 24  # pairs of a query and a list, whose order is in memory at once
LISTS_PER_JOB = 1 << 9


def log_target_shares(known: SortedLists, counts: np.ndarray, lists: np.ndarray, targets: np.ndarray) -> Tensor:
    """Log of the share of each list's entries whose value is the target: (n, m), (n,) -> (n, m), -inf for none.

    What is known of a list is looked at once, for all queries that ask for it, in the order of the files; so they need
    not be in memory.

    Args:
        counts: (lists,) how much each list counts: its entries, or the sum of their weights
        lists: -1 for none
    """
    shares = np.full(lists.shape, -np.inf, np.float32)
    by_target = stable_order(targets)  # ascending targets are found in a list faster than mixed ones
    step = max(1, PLACES_AT_ONCE // max(1, lists.shape[1]))
    for start in range(0, len(targets), step):
        rows = by_target[start : start + step]
        shares[rows] = _shares_of_part(known, counts, lists[rows], targets[rows])
    return torch.from_numpy(shares)


def _shares_of_part(known: SortedLists, counts: np.ndarray, lists: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """As ``log_target_shares``, of queries whose targets ascend."""
    shares = np.full(lists.size, -np.inf, np.float32)
    flat = np.where(lists < 0, len(counts), lists).ravel()  # -1 (no list) becomes the last number
    places = stable_order(flat)
    ends = np.bincount(flat, minlength=len(counts) + 1).cumsum()
    begins = np.concatenate([[0], ends[:-1]])
    targets = targets.repeat(lists.shape[1])

    def find(numbers: np.ndarray) -> None:
        for number, begin, end in zip(numbers.tolist(), begins[numbers].tolist(), ends[numbers].tolist()):
            own = places[begin:end]
            values, run_counts = known.run_values_of(number), known.run_counts_of(number)
            wanted = targets[own]
            runs = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
            found = np.flatnonzero(values[runs] == wanted)
            shares[own[found]] = np.log(run_counts[runs[found]] / counts[number])

    asked = np.flatnonzero((ends > begins)[:-1] & (counts > 0))
    for_each(find, [(asked[first : first + LISTS_PER_JOB],) for first in range(0, len(asked), LISTS_PER_JOB)])
    return shares.reshape(lists.shape)
