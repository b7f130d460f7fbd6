"""The neighbours of every token of a split, searched once: the table that SPALM reads in training.

A token of the datastore's own text never finds itself, nor entries within a window of it.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..data.neighbor_table import LOG_WEIGHTS, NeighborFacts, is_done, open_table_folder, receipt_path, write_shard
from ..datastore import Datastore, Shard
from ..errors import KnnlmError
from ..progress import progress
from ..search import Search
from ..search.own_text import default_window, place_queries, query_vectors
from ..storage import Lock

logger = logging.getLogger(__name__)

QUERIES_PER_PART = 1 << 16


def make_neighbors(
    folder: str | Path,
    datastore: Datastore,
    queries: Datastore,
    engine: Search,
    k: int,
    search: dict[str, Any],
    window: int | None,
    shards: tuple[int, int],
) -> int:
    """Fill the missing shards in [first, last) of the table in ``folder``; how many tokens that was.

    Args:
        search: what the engine is, for the record: metric, index, nprobe
        window: None: a sequence length if the queries are the datastore's own text or a part of it, else 0
    """
    folder, placed = Path(folder), place_queries(datastore, queries)
    if placed.sentence:
        logger.info(placed.sentence)
    places = datastore.positions
    if window is None:
        window = default_window(queries) if placed.own_text else 0
    if window and not placed.own_text:
        raise KnnlmError("--window is for queries that are the datastore's own text or a part of it; leave it out")
    if k < 1 or k > len(datastore):
        raise KnnlmError(f"--k must be between 1 and the datastore's {len(datastore):,} entries, not {k}")
    if window < 0:
        raise KnnlmError(f"--window must be 0 or more, not {window}")
    rows = [shard.rows for shard in queries.shards]
    facts = NeighborFacts(
        k, rows, queries.manifest.source, queries.fingerprint, datastore.fingerprint, search, window, receipts=True,
        weighted=datastore.is_weighted,
    )  # fmt: skip
    open_table_folder(folder, facts)
    missing = [shard for shard in queries.shards[shards[0] : shards[1]] if not is_done(folder, shard.number)]
    total = sum(shard.rows for shard in missing)

    def search_shard(shard: Shard, update: Callable[[int], Any]) -> dict[str, np.ndarray]:
        found: dict[str, list[np.ndarray]] = {kind: [] for kind in facts.kinds}
        for start in range(shard.start, shard.stop, QUERIES_PER_PART):
            rows = np.arange(start, min(start + QUERIES_PER_PART, shard.stop))
            vectors = query_vectors(datastore, queries, rows)
            positions = None if placed.positions is None else placed.positions[rows]
            distances, ids = search_outside(engine, vectors, k, positions, window, places)
            retrieved = np.where(ids >= 0, datastore.values_of(ids).astype(np.int64), -1)
            found["ids"].append(ids)
            found["distances"].append(distances)
            log_weights = datastore.log_weights_of(ids)
            if log_weights is not None:
                found[LOG_WEIGHTS].append(log_weights)
            found["tokens"].append(np.column_stack([queries.values[rows], retrieved]))
            update(len(rows))
        return {kind: np.concatenate(parts) for kind, parts in found.items()}

    with progress("finding neighbours", total, " tokens") as bar:
        for shard in missing:
            lock = receipt_path(folder, shard.number).with_suffix(".lock")
            with Lock(lock, f"searching shard {shard.number} of {folder}"):
                if not is_done(folder, shard.number):  # another process may have done it meanwhile
                    write_shard(folder, shard.number, search_shard(shard, bar.update))
                else:
                    bar.update(shard.rows)
    return total


def search_outside(
    engine: Search,
    queries: np.ndarray,
    k: int,
    positions: np.ndarray | None,
    window: int,
    places: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest entries that are not within ``window`` of each query's own position: (n, k), (n, k).

    Most queries have few of those near, so some more than k are searched; the others are searched again for as many as
    could be in the way.

    Args:
        positions: (n,) of the queries in the datastore's text; None: it is another text, nothing is in the way
        places: positions of the entries, as ``Datastore.positions`` has them
    """
    if positions is None:
        return _fill(*engine.search(queries, k), k)
    distances, ids = np.full((len(queries), k), np.inf, np.float32), np.full((len(queries), k), -1, np.int64)
    left, wanted = np.arange(len(queries)), 2 * k + 8
    most = k + 2 * window + 1  # k, and all that can be in the way
    while len(left):
        wanted = min(wanted, most)
        near, found = engine.search(queries[left], wanted)
        entry_positions = found if places is None else places[np.maximum(found, 0)]
        outside = (np.abs(entry_positions - positions[left, None]) > window) & (found >= 0)
        no_more = (found[:, -1] < 0) | (found.shape[1] < wanted) | (wanted == most)  # however many are asked for
        near, found = _keep_first(near, found, outside, k)
        done = ((found >= 0).sum(axis=1) == k) | no_more
        width = found.shape[1]  # less than k where the datastore has fewer entries
        distances[left[done], :width], ids[left[done], :width] = near[done], found[done]
        left, wanted = left[~done], 8 * wanted
    return distances, ids


def _keep_first(
    distances: np.ndarray, ids: np.ndarray, wanted: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of each row the first k neighbours that are wanted, in their order; id -1 where there are fewer.

    Example with k = 2: 3 queries with 4 neighbours each, of which those in brackets are within the window:

        7 (2) 9  4            7  9
       (3)(1) 5 (8)    ->     5 -1
        6  2 (7) 1            6  2
    """
    order = np.argsort(~wanted, axis=1, kind="stable")[:, :k]  # the wanted ones come first, and stay in order
    is_wanted, distances, ids = (np.take_along_axis(array, order, axis=1) for array in (wanted, distances, ids))
    return np.where(is_wanted, distances, np.inf), np.where(is_wanted, ids, -1)


def _fill(distances: np.ndarray, ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    missing = k - ids.shape[1]
    return (
        np.pad(distances, ((0, 0), (0, missing)), constant_values=np.inf),
        np.pad(ids, ((0, 0), (0, missing)), constant_values=-1),
    )
