"""Greedy merging (He et al. 2021, "Efficient Nearest Neighbor Language Models"): of two near entries with the same
value one goes, and the other counts for both.

Merging always takes the two nearest entries that are left in a list and have the same value; the one that counts more
stays, or the earlier one. Which merges happen does not depend on how many are wanted: fewer are the first ones. So all
merges are found once, and any number of entries can be kept of them.

The two nearest entries of all are each other's nearest; so are many other pairs, whose merges do not touch each other.
All of these are merged in one round: a pair stays each other's nearest, whatever happens elsewhere, until it is merged.
"""

from dataclasses import dataclass

import numpy as np

from .list_walk import ListEntries, ListWalk, parts_of_runs, square_distances

ELEMENTS_AT_ONCE = 1 << 22  # of a matrix of distances, where neighbours of any value are looked at


@dataclass
class Merges:
    """What becomes of every entry if all merges are done."""

    into: np.ndarray  # (entries,) the entry that it is merged into; its own number: it stays
    distances: np.ndarray  # (entries,) float32 squared distance of the two; infinite: it stays

    def kept(self, count: int, weights: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """After as many of the first merges as it takes to keep ``count`` entries: their numbers and weights, and for
        every entry the one that stands for it.

        Where all merges leave more than that, those that count least go; of equals some drawn at random.

        Args:
            weights: (entries,) that the entries had before
        """
        order = np.argsort(self.distances, kind="stable")
        merged = order[: max(0, len(order) - count)]
        merged = merged[np.isfinite(self.distances[merged])]
        place = np.arange(len(self.into))
        place[merged] = self.into[merged]
        while not np.array_equal(further := place[place], place):  # where an entry went that went on itself
            place = further
        totals = np.bincount(place, weights, minlength=len(place))
        stays = np.flatnonzero(place == np.arange(len(place)))
        if len(stays) > count:
            stays = heaviest(stays, totals[stays], count, seed)
        return stays, totals[stays].astype(np.float32), place


def heaviest(ids: np.ndarray, scores: np.ndarray, count: int, seed: int) -> np.ndarray:
    """The ``count`` of ids (n,) with the largest scores (n,), ascending; of equals some drawn at random."""
    drawn = np.random.default_rng(seed).permutation(len(ids))
    order = drawn[np.argsort(-scores[drawn], kind="stable")]
    return np.sort(ids[order[:count]])


def find_merges(walk: ListWalk, neighbors: int | None) -> Merges:
    """All merges of a datastore, list by list.

    Args:
        neighbors: merge only entries of which one is among so many nearest ones, of any value, of the other; None: all
    """
    entries = len(walk.datastore)
    found = Merges(np.arange(entries), np.full(entries, np.inf, np.float32))

    def merge(own: ListEntries) -> None:
        for removed, into, distance in merges_of_list(own, neighbors):
            found.into[own.ids[removed]] = own.ids[into]
            found.distances[own.ids[removed]] = distance

    walk.each(merge, "merging")
    return found


def merges_of_list(own: ListEntries, neighbors: int | None) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Rounds of merges in a list: places that go, places that they go into, and squared distances, (n,) each."""
    farthest = None if neighbors is None else _nearest_of_any_value(own, neighbors)
    found = []
    for first, stop, _, _ in parts_of_runs(own.run_ends):
        part, values = slice(first, stop), own.values[first:stop]
        distances = square_distances(own.keys[part], own.keys[part]).numpy()
        distances = np.maximum(distances, distances.T)  # rounding is not symmetric
        allowed = values[:, None] == values
        np.fill_diagonal(allowed, False)
        if farthest is not None:
            near = distances <= farthest[part, None]
            allowed &= near | near.T
        distances[~allowed] = np.inf
        found += [(first + goes, first + stays, far) for goes, stays, far in merge_rounds(distances, own.weights[part])]
    return found


def merge_rounds(distances: np.ndarray, weights: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Merge until nothing is left to: distances (m, m), symmetric, infinite where two are not to be merged.

    Each round merges every pair of each other's nearest.
    """
    names, weights, rounds = np.arange(len(weights)), weights.astype(np.float64), []
    while len(names):
        rows = np.arange(len(names))
        nearest = distances.argmin(axis=1)
        far = distances[rows, nearest]
        first = np.flatnonzero((nearest[nearest] == rows) & (rows < nearest) & np.isfinite(far))
        if not len(first):
            break
        second = nearest[first]
        stays = np.where(weights[second] > weights[first], second, first)  # of equals the earlier one
        goes = first + second - stays
        weights[stays] += weights[goes]
        rounds.append((names[goes], names[stays], far[first]))
        keep = np.isfinite(far)  # the others have nobody to merge with
        keep[goes] = False
        names, weights, distances = names[keep], weights[keep], distances[np.ix_(keep, keep)]
    return rounds


def _nearest_of_any_value(own: ListEntries, count: int) -> np.ndarray:
    """How far the so many nearest entries of each entry are, at most: (m,)."""
    size = len(own.ids)
    if count >= size:
        return np.full(size, np.inf, np.float32)
    step, parts = max(1, ELEMENTS_AT_ONCE // size), []
    for start in range(0, size, step):
        distances = square_distances(own.keys[start : start + step], own.keys).numpy()
        rows = np.arange(len(distances))
        distances[rows, start + rows] = -1  # itself, the first of count + 1
        parts.append(np.partition(distances, count, axis=1)[:, count])
    return np.concatenate(parts)
