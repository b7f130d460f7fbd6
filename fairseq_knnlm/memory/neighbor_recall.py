"""How many of the true neighbours a search that visits few lists finds: on a sample of the queries, by nprobe."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..datastore import Datastore
from ..progress import each
from ..search import ExactSearch, Search
from ..search.own_text import default_window, place_queries, query_vectors
from .neighbor_search import search_outside

NPROBES = (4, 8, 16, 32, 64)


@dataclass
class Recall:
    """What one number of visited lists finds."""

    nprobe: int | None  # None: every key is looked at
    first: float  # share of queries whose nearest neighbour is the true one
    among_k: float  # share of the true k neighbours that are found
    right_first: float  # share of queries whose first neighbour has the value that follows
    right_among_k: float  # ... and of those where one of the k has it
    seconds_per_million: float  # processor time

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_recall(
    datastore: Datastore,
    queries: Datastore,
    engine_of: Callable[[int], Search],
    k: int,
    metric: str,
    window: int | None,
    sample: int,
    nprobes: tuple[int, ...] = NPROBES,
    seed: int = 1,
) -> list[Recall]:
    """Search a random sample of the queries exactly, and with each nprobe; self and window are left out as in a table.

    Two entries at the same distance are both the true neighbour: a distance counts, not its entry.

    Args:
        engine_of: the search that visits so many lists
        window: as for ``make_neighbors``
    """
    placed = place_queries(datastore, queries)
    if window is None:
        window = default_window(queries) if placed.own_text else 0
    rows = np.sort(np.random.default_rng(seed).permutation(len(queries))[:sample])
    vectors, targets = query_vectors(datastore, queries, rows), queries.values[rows].astype(np.int64)
    positions = None if placed.positions is None else placed.positions[rows]

    def search(engine: Search) -> tuple[np.ndarray, np.ndarray, float]:
        started = sum(os.times()[:2])
        distances, ids = search_outside(engine, vectors, k, positions, window, datastore.positions)
        return distances, ids, 1e6 * (sum(os.times()[:2]) - started) / len(rows)

    def facts(nprobe: int | None, distances: np.ndarray, ids: np.ndarray, seconds: float) -> Recall:
        # Distances of the same pair differ in their last digits between engines.
        allowed = exact[:, -1:] + 1e-3 * np.abs(exact[:, -1:]) + 1e-6
        nearest = exact[:, :1] + 1e-3 * np.abs(exact[:, :1]) + 1e-6
        right = (datastore.values_of(ids) == targets[:, None]) & (ids >= 0)
        found = (ids >= 0) & (distances <= allowed)
        first = (ids[:, :1] >= 0) & (distances[:, :1] <= nearest)
        return Recall(
            nprobe, float(first.mean()), float(found.sum() / max(1, known)), float(right[:, 0].mean()),
            float(right.any(axis=1).mean()), seconds,
        )  # fmt: skip

    sign = 1.0 if metric == "l2" else -1.0  # similarities grow towards the query
    of_exact = search(ExactSearch(datastore, metric))
    exact, known = sign * of_exact[0], int((of_exact[1] >= 0).sum())
    results = [facts(None, exact, *of_exact[1:])]
    for nprobe in each(nprobes, "nprobe", len(nprobes)):
        distances, ids, seconds = search(engine_of(nprobe))
        results.append(facts(nprobe, sign * distances, ids, seconds))
    return results
