"""Merging by means (Ward 1963): near entries with the same value become one, at the mean of their keys.

To merge two that count a and b, at the squared distance D, adds a b / (a + b) D to the sum of the squared distances of
all entries from the mean that stands for them. The cheapest merge always comes first. As in ``merging``, which merges
happen does not depend on how many are wanted, so all of them are found once.

The cheapest pair of all is each other's cheapest; so are many other pairs. All of these are merged in one round: the
mean of two is never cheaper to reach than the cheaper of them was (a property of Ward's cost that is called
reducibility), so a pair stays each other's cheapest, whatever happens elsewhere, until it is merged.

To keep one of two entries as it is (``merging``) moves mass by their whole distance, often several temperatures; their
mean is half as far from both, which is a quarter of the squared distance.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..datastore import Datastore
from .list_walk import ListEntries, ListWalk, parts_of_runs, square_distances
from .merging import Merges

LISTS_AT_ONCE = 16  # near lists that are one to us: rare values have few entries in a single list
ENTRIES_TOGETHER = 256  # of several values, in one matrix: more of them would mostly be pairs of different values
KEYS_AT_ONCE = 1 << 16  # whose means are computed at once


def find_averages(walk: ListWalk, lists_at_once: int) -> Merges:
    """All merges of a datastore, group by group of near lists; the cost of each in the place of its distance."""
    entries = len(walk.datastore)
    found = Merges(np.arange(entries), np.full(entries, np.inf, np.float32))

    def merge(own: ListEntries) -> None:
        for first, stop, _, _ in parts_of_runs(own.run_ends, together=ENTRIES_TOGETHER):
            part = slice(first, stop)
            merges = average_rounds(own.keys[part], own.values[part], own.weights[part], own.ids[part])
            for removed, into, costs in merges:
                found.into[removed] = into
                found.distances[removed] = costs

    walk.each(merge, "merging", lists_at_once)
    return found


def average_rounds(
    keys: Tensor, values: np.ndarray, weights: np.ndarray, ids: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Merge until nothing is left to: ids that go, ids that they go into, and costs, (n,) each, of every round.

    Of two the one that counts more gives its name to both, or the earlier one.

    Args:
        keys: (m, dim) float32
        values: (m,) those of different values are never merged
        weights: (m,)
        ids: (m,)
    """
    rounds, names = [], torch.from_numpy(ids.astype(np.int64))
    value, count = torch.from_numpy(values.astype(np.int64)), torch.from_numpy(weights.astype(np.float32))
    highest = torch.zeros(len(keys))  # cost of what was merged into each: rounding must not make a later merge cheaper
    while len(names) > 1:
        costs = _costs(keys, value, count)
        cost, other = costs.min(dim=1)
        rows, can = torch.arange(len(names)), torch.isfinite(cost)
        first = ((other[other] == rows) & (rows < other) & can).nonzero()[:, 0]
        if not len(first):
            break
        second = other[first]
        equal, earlier = count[second] == count[first], names[second] < names[first]
        stays = torch.where((count[second] > count[first]) | (equal & earlier), second, first)
        goes = first + second - stays
        total = count[stays] + count[goes]
        sums = keys[stays] * count[stays, None] + keys[goes] * count[goes, None]
        keys = keys.index_copy(0, stays, sums / total[:, None])
        count = count.index_copy(0, stays, total)
        paid = torch.maximum(cost[first], torch.maximum(highest[first], highest[second]))
        highest = highest.index_copy(0, stays, paid)
        rounds.append((names[goes].numpy(), names[stays].numpy(), paid.numpy()))
        can[goes] = False  # and who has nobody to merge with is done, too
        keys, value, count, highest, names = keys[can], value[can], count[can], highest[can], names[can]
    return rounds


def _costs(keys: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """Of merging each two, (m, m), exactly symmetric; infinite where their values differ."""
    costs = square_distances(keys, keys)
    costs *= weights[:, None] * weights / (weights[:, None] + weights)
    costs.masked_fill_(values[:, None] != values, torch.inf).fill_diagonal_(torch.inf)
    return torch.maximum(costs, costs.T)  # rounding is not symmetric


class MeanKeys:
    """The stored keys of entries that stand for several: the mean of theirs."""

    def __init__(self, datastore: Datastore, place: np.ndarray):
        """place: (entries,) the entry that stands for each"""
        self._datastore = datastore
        self._members = np.argsort(place, kind="stable")  # those of one place side by side
        self._ends = np.bincount(place, minlength=len(place)).cumsum()

    def gather(self, ids: np.ndarray) -> np.ndarray:
        """(n,) -> (n, dim) as they are stored."""
        ends, starts = self._ends[ids], np.where(ids > 0, self._ends[ids - 1], 0)
        cuts = np.searchsorted((ends - starts).cumsum(), np.arange(KEYS_AT_ONCE, (ends - starts).sum(), KEYS_AT_ONCE))
        edges = np.unique([0, *cuts, len(ids)])
        return np.concatenate([self._means(starts[i:j], ends[i:j]) for i, j in pairwise(edges)])

    def _means(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Of the members from each start to its end: (n,), (n,) -> (n, dim)."""
        sizes = ends - starts
        firsts = sizes.cumsum() - sizes
        members = self._members[np.repeat(starts - firsts, sizes) + np.arange(sizes.sum())]
        keys = self._datastore.gather_keys(members).astype(np.float64)
        weights = np.ones(len(members)) if self._datastore.weights is None else self._datastore.weights[members]
        totals = np.add.reduceat(weights.astype(np.float64), firsts)
        means = np.add.reduceat(keys * weights[:, None], firsts) / totals[:, None]
        return self._datastore.codec.quantize(means)
