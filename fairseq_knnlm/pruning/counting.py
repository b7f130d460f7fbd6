"""How often an entry is retrieved with the right value, by text that is not its own."""

import numpy as np
from torch import Tensor

from .list_walk import ListEntries, ListWalk, QueryRows, square_distances
from .merging import ELEMENTS_AT_ONCE


def count_retrievals(walk: ListWalk, neighbors: int, window: int | None, queries: QueryRows | None) -> np.ndarray:
    """For how many queries each entry is among the nearest of its list and has the query's value: (entries,) float32.

    Args:
        neighbors: how many nearest entries a query retrieves
        window: entries within so many positions of a query are of its own text, and left out; None: it has none here
        queries: whose neighbours are looked at; None: every entry's own
    """
    counts = np.zeros(len(walk.datastore), np.float32)
    places = walk.datastore.positions

    def count(own: ListEntries) -> None:
        positions = own.ids if places is None else np.asarray(places[own.ids])
        if queries is None:
            keys, values, query_positions, weights = own.keys, own.values, positions, own.weights
        else:
            rows, keys = queries.of(own)
            values, query_positions = queries.values(rows), queries.positions(rows)
            weights = np.ones(len(rows), np.float32)
        counts[own.ids] = retrievals(own, positions, keys, values, query_positions, weights, neighbors, window)

    walk.each(count, "counting")
    return counts


def retrievals(
    own: ListEntries,
    positions: np.ndarray,
    keys: Tensor,
    values: np.ndarray,
    query_positions: np.ndarray,
    weights: np.ndarray,
    neighbors: int,
    window: int | None,
) -> np.ndarray:
    """Of the entries of one list: (m,). The queries have keys (r, dim), values (r,), positions (r,), weights (r,)."""
    size = len(own.ids)
    counts, step = np.zeros(size), max(1, ELEMENTS_AT_ONCE // size)
    for start in range(0, len(keys), step):
        some = slice(start, start + step)
        distances = square_distances(keys[some], own.keys).numpy()
        if window is not None:
            distances[np.abs(query_positions[some, None] - positions) <= window] = np.inf
        hits = np.isfinite(distances) & (values[some, None] == own.values)
        if neighbors < size:
            hits &= distances <= np.partition(distances, neighbors - 1, axis=1)[:, neighbors - 1 : neighbors]
        counts += weights[some] @ hits
    return counts
