"""The share that a query's target has of the entries of lists which nobody reads, from what stands beside an index."""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..index.list_files import SortedLists
from ..parallel import for_each
from .visits import stable_order

QUERIES_PER_JOB = 1 << 12


class TargetShares:
    """The runs of an index by value: which lists have a value, and how much of each list it is."""

    def __init__(self, lists: SortedLists, counts: np.ndarray, run_counts: np.ndarray):
        """
        Args:
            counts: (lists,) how much each list counts: its entries, or the sum of their weights
            run_counts: (runs,) the same of each run
        """
        numbers = np.repeat(np.arange(len(counts), dtype=np.int32), np.diff(lists.run_starts))
        order = stable_order(lists.run_values)
        self._lists = numbers[order]  # of each run, in the order of the values
        self._log_shares = np.log(run_counts / counts[numbers]).astype(np.float32)[order]
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(lists.run_values))])  # (values + 1,)
        self._list_count = len(counts)

    def __call__(self, lists: np.ndarray, targets: np.ndarray) -> Tensor:
        """Log of the share of each list's entries whose value is the target: (n, m), (n,) -> (n, m), -inf for none."""
        found = np.full(lists.shape, -np.inf, np.float32)
        order = stable_order(targets)  # queries of one target follow each other
        begins = np.flatnonzero(np.diff(targets[order], prepend=-1))  # where the next target begins
        edges = np.append(begins, len(order))

        def find(first: int, stop: int) -> None:
            # The share of one target in every list, and -inf for list -1, which means none: so a look-up is one step.
            shares = np.full(self._list_count + 1, -np.inf, np.float32)
            for begin, end in zip(edges[first:stop].tolist(), edges[first + 1 : stop + 1].tolist()):
                rows = order[begin:end]
                target = int(targets[rows[0]])
                if target + 1 < len(self._starts):  # else no entry has it
                    runs = slice(self._starts[target], self._starts[target + 1])
                    own = self._lists[runs]
                    shares[own] = self._log_shares[runs]
                    found[rows] = shares[lists[rows]]
                    shares[own] = -np.inf

        cuts = np.unique(np.searchsorted(begins, np.arange(0, len(order) + QUERIES_PER_JOB, QUERIES_PER_JOB)))
        for_each(find, list(pairwise(cuts.tolist())))
        return torch.from_numpy(found)
