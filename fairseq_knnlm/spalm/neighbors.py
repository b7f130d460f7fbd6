"""For every token of a split the tokens that followed its nearest stored contexts: computed once, read in training.

    DIR/neighbors.json             which queries, which datastore, K, what was left out
    DIR/tokens-00000.npy (rows, K) the retrieved output tokens, nearest first, -1 where there is none
    DIR/ids-00000.npy    (rows, K) their entries in the datastore
    DIR/distances-00000.npy (rows, K) float32

A shard is a shard of the queries, which are a datastore of the split (fairseq-eval-lm --knn-dump).
"""

import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ..datastore import Datastore
from ..errors import KnnlmError
from ..files import check_disk_space, disk_full, read_json, read_versioned, write_json
from ..search import Search

logger = logging.getLogger(__name__)

FORMAT = "fairseq-knnlm neighbor-table"
VERSION = 1
FACTS = "neighbors.json"
KINDS = {"tokens": "int32", "ids": "int64", "distances": "float32"}
ROWS_AT_ONCE = 1 << 16


@dataclass
class NeighborFacts:
    """What neighbors.json says."""

    k: int
    rows: list[int]  # of each shard
    queries: dict[str, Any]  # source of the split
    queries_keys: str  # fingerprints
    datastore_keys: str
    metric: str
    window: int  # a token's own entry and those within so many positions are left out; 0: another text
    format: str = FORMAT
    version: int = VERSION


class NeighborTable:
    """A finished table, open for reading."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        content = read_versioned(self.folder / FACTS, FORMAT, VERSION, "make it with knnlm neighbors")
        self.facts = NeighborFacts(**content)
        missing = [number for number in range(len(self.facts.rows)) if not _is_done(self.folder, number)]
        if missing:
            raise KnnlmError(
                f"{self.folder} is incomplete ({len(missing)} of {len(self.facts.rows)} shards are missing); run the "
                "same knnlm neighbors command again"
            )
        self.k = self.facts.k
        self._starts = np.cumsum([0, *self.facts.rows])
        self._arrays = {
            kind: [self._map(kind, number, rows) for number, rows in enumerate(self.facts.rows)] for kind in KINDS
        }

    def _map(self, kind: str, number: int, rows: int) -> np.ndarray:
        path = self.folder / _name(kind, number)
        try:
            array = np.load(path, mmap_mode="r")
        except (ValueError, OSError, EOFError) as error:
            raise KnnlmError(f"{path} is damaged ({error}); delete it and run knnlm neighbors again") from error
        if array.shape != (rows, self.facts.k):
            raise KnnlmError(f"{path} has the shape {array.shape}; delete it and run knnlm neighbors again")
        return array

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, kind: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of tokens, ids or distances: (rows, K)."""
        parts = []
        for array, first in zip(self._arrays[kind], self._starts):
            low, high = max(start - first, 0), min(stop - first, len(array))
            if low < high:
                parts.append(array[low:high])
        return np.concatenate(parts) if parts else np.empty((0, self.k), KINDS[kind])

    def tokens(self, start: int, stop: int) -> Tensor:
        return torch.from_numpy(self.read("tokens", start, stop).astype(np.int64))


def _name(kind: str, number: int) -> str:
    return f"{kind}-{number:05d}.npy"


def _is_done(folder: Path, number: int) -> bool:
    return all((folder / _name(kind, number)).exists() for kind in KINDS)


def make_neighbors(
    folder: str | Path,
    datastore: Datastore,
    queries: Datastore,
    engine: Search,
    k: int,
    metric: str,
    window: int | None,
    shards: tuple[int, int],
) -> int:
    """Fill the missing shards in [first, last) of the table in ``folder``; how many tokens that was.

    Args:
        window: None: a sequence length if the queries are the datastore's own text, else 0
    """
    folder, own_text = Path(folder), queries.fingerprint == datastore.fingerprint
    if window is None:
        window = int(queries.manifest.source.get("tokens_per_sample", 512)) if own_text else 0
    if k < 1 or k > len(datastore):
        raise KnnlmError(f"--k must be between 1 and the datastore's {len(datastore):,} entries, not {k}")
    rows = [shard.rows for shard in queries.shards]
    facts = NeighborFacts(k, rows, queries.manifest.source, queries.fingerprint, datastore.fingerprint, metric, window)
    _open_folder(folder, facts)
    done = 0
    for shard in tqdm(queries.shards[shards[0] : shards[1]], unit="shard", desc="searching"):
        if _is_done(folder, shard.number):
            continue
        found: dict[str, list[np.ndarray]] = {kind: [] for kind in KINDS}
        for start in range(shard.start, shard.stop, ROWS_AT_ONCE):
            positions = np.arange(start, min(start + ROWS_AT_ONCE, shard.stop))
            distances, ids = search_outside(
                engine, queries.gather_keys(positions).astype(np.float32), k, positions if own_text else None, window
            )
            found["ids"].append(ids)
            found["distances"].append(distances)
            found["tokens"].append(np.where(ids >= 0, datastore.values[np.maximum(ids, 0)].astype(np.int64), -1))
        _write(folder, shard.number, {kind: np.concatenate(parts) for kind, parts in found.items()})
        done += shard.rows
    return done


def search_outside(
    engine: Search, queries: np.ndarray, k: int, positions: np.ndarray | None, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest entries that are not within ``window`` of each query's own position: (n, k), (n, k).

    Most queries have few of those near, so some more than k are searched; the others are searched again for as many as
    could be in the way.
    """
    if positions is None:
        return _fill(*engine.search(queries, k), k)
    distances, ids = np.full((len(queries), k), np.inf, np.float32), np.full((len(queries), k), -1, np.int64)
    left, wanted = np.arange(len(queries)), 2 * k + 8
    while len(left):
        wanted = min(wanted, k + 2 * window + 1)
        near, found = engine.search(queries[left], wanted)
        outside = (np.abs(found - positions[left, None]) > window) & (found >= 0)
        order = np.argsort(~outside, axis=1, kind="stable")[:, :k]
        counts = outside.sum(axis=1)
        done = (counts >= k) | (found.shape[1] < wanted) | (wanted == k + 2 * window + 1)
        rows = left[done]
        good = np.take_along_axis(outside, order, 1)[done]
        best_ids, best = np.take_along_axis(found, order, 1)[done], np.take_along_axis(near, order, 1)[done]
        width = good.shape[1]
        ids[rows[:, None], np.arange(width)] = np.where(good, best_ids, -1)
        distances[rows[:, None], np.arange(width)] = np.where(good, best, np.inf)
        left, wanted = left[~done], 8 * wanted
    return distances, ids


def _fill(distances: np.ndarray, ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    missing = k - ids.shape[1]
    return (
        np.pad(distances, ((0, 0), (0, missing)), constant_values=np.inf),
        np.pad(ids, ((0, 0), (0, missing)), constant_values=-1),
    )


def _open_folder(folder: Path, facts: NeighborFacts) -> None:
    if (folder / FACTS).exists():
        if read_json(folder / FACTS) != asdict(facts):
            raise KnnlmError(f"{folder} holds other neighbours; choose another -o, or delete it")
        return
    if folder.exists() and any(folder.iterdir()):
        raise KnnlmError(f"{folder} is not empty; choose another -o")
    folder.mkdir(parents=True, exist_ok=True)
    row = facts.k * sum(np.dtype(dtype).itemsize for dtype in KINDS.values())
    check_disk_space(folder, sum(facts.rows) * row, "the table of neighbours")
    write_json(folder / FACTS, asdict(facts))


def _write(folder: Path, number: int, arrays: dict[str, np.ndarray]) -> None:
    for kind, array in arrays.items():
        temporary = folder / f"{_name(kind, number)}.tmp-{os.getpid()}"
        try:
            with open(temporary, "wb") as file:
                np.save(file, array.astype(KINDS[kind]))
            os.replace(temporary, folder / _name(kind, number))
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise disk_full(error, folder) from error
