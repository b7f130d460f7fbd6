"""For every token of a split the tokens that followed its nearest stored contexts: computed once, read in training.

    DIR/neighbors.json                  which queries, which datastore, K, what was left out
    DIR/tokens-00000.npy  (rows, 1 + K) the token itself, then the retrieved output tokens, nearest first, -1: none
    DIR/ids-00000.npy     (rows, K)     their entries in the datastore
    DIR/distances-00000.npy (rows, K)   float32

A shard is a shard of the queries, which are a datastore of the split (fairseq-eval-lm --knn-dump). A row begins with
its own token, so that a table that has slipped against its text is noticed.
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

from ..datastore import POSITIONS, Datastore
from ..errors import KnnlmError
from ..files import check_disk_space, disk_full, read_json, read_versioned, write_json
from ..search import Search

logger = logging.getLogger(__name__)

FORMAT = "fairseq-knnlm neighbor-table"
VERSION = 1
FACTS = "neighbors.json"
KINDS = {"tokens": "int32", "ids": "int64", "distances": "float32"}
ROWS_AT_ONCE = 1 << 16
OWN = 1  # the first column of the tokens


@dataclass
class NeighborFacts:
    """What neighbors.json says."""

    k: int
    rows: list[int]  # of each shard
    queries: dict[str, Any]  # source of the split
    queries_keys: str  # fingerprints
    datastore_keys: str
    search: dict[str, Any]  # metric, index and nprobe
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
        if array.shape != (rows, self.facts.k + (OWN if kind == "tokens" else 0)):
            raise KnnlmError(f"{path} has the shape {array.shape}; delete it and run knnlm neighbors again")
        return array

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _read(self, kind: str, start: int, stop: int) -> np.ndarray:
        parts = []
        for array, first in zip(self._arrays[kind], self._starts):
            low, high = max(start - first, 0), min(stop - first, len(array))
            if low < high:
                parts.append(array[low:high])
        return np.concatenate(parts) if parts else np.empty((0, *self._arrays[kind][0].shape[1:]), KINDS[kind])

    def own_tokens(self, start: int, stop: int) -> np.ndarray:
        """The tokens of the text themselves, (rows,)."""
        return self._read("tokens", start, stop)[:, 0]

    def tokens(self, start: int, stop: int) -> Tensor:
        """The retrieved tokens of rows [start, stop): (rows, K)."""
        return torch.from_numpy(self._read("tokens", start, stop)[:, OWN:].astype(np.int64))

    def ids(self, start: int, stop: int) -> np.ndarray:
        """Their entries in the datastore, (rows, K)."""
        return self._read("ids", start, stop)

    def distances(self, start: int, stop: int) -> np.ndarray:
        return self._read("distances", start, stop)

    def check_text(self, text: np.ndarray) -> None:
        """Refuse a table whose rows do not belong to these tokens (n,), one for one."""
        for array, first in zip(self._arrays["tokens"], self._starts):
            wrong = np.flatnonzero(array[:, 0] != text[first : first + len(array)])
            if len(wrong):
                raise KnnlmError(
                    f"{self.folder} does not fit the text: row {first + wrong[0]:,} belongs to another token, so the "
                    "table has slipped or is of another text; run knnlm neighbors for it again"
                )

    def shares_of_target(self) -> np.ndarray:
        """How often the first neighbour is the token itself, how often one of the first two, ...: (K,)."""
        found = np.zeros(self.k)
        for array in self._arrays["tokens"]:
            found += np.logical_or.accumulate(array[:, OWN:] == array[:, :1], axis=1).sum(axis=0)
        return found / len(self)


def _name(kind: str, number: int) -> str:
    return f"{kind}-{number:05d}.npy"


def _is_done(folder: Path, number: int) -> bool:
    return all((folder / _name(kind, number)).exists() for kind in KINDS)


def is_complete(folder: str | Path) -> bool:
    folder = Path(folder)
    return all(_is_done(folder, number) for number in range(len(read_json(folder / FACTS)["rows"])))


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
        window: None: a sequence length if the queries are the datastore's own text, else 0
    """
    folder, own_text = Path(folder), _is_own_text(datastore, queries)
    places = corpus_positions(datastore)
    if window is None:
        window = int(queries.manifest.source.get("tokens_per_sample", 512)) if own_text else 0
    if window and not own_text:
        raise KnnlmError("--window is for queries that are the datastore's own text; leave it out")
    if k < 1 or k > len(datastore):
        raise KnnlmError(f"--k must be between 1 and the datastore's {len(datastore):,} entries, not {k}")
    if window < 0:
        raise KnnlmError(f"--window must be 0 or more, not {window}")
    rows = [shard.rows for shard in queries.shards]
    facts = NeighborFacts(k, rows, queries.manifest.source, queries.fingerprint, datastore.fingerprint, search, window)
    _open_folder(folder, facts)
    missing = [shard for shard in queries.shards[shards[0] : shards[1]] if not _is_done(folder, shard.number)]
    total = sum(shard.rows for shard in missing)
    with tqdm(total=total, unit="token", unit_scale=True, desc="searching", disable=not total) as bar:
        for shard in missing:
            found: dict[str, list[np.ndarray]] = {kind: [] for kind in KINDS}
            for start in range(shard.start, shard.stop, ROWS_AT_ONCE):
                positions = np.arange(start, min(start + ROWS_AT_ONCE, shard.stop))
                vectors = queries.gather_keys(positions).astype(np.float32)
                distances, ids = search_outside(engine, vectors, k, positions if own_text else None, window, places)
                retrieved = np.where(ids >= 0, datastore.values[np.maximum(ids, 0)].astype(np.int64), -1)
                found["ids"].append(ids)
                found["distances"].append(distances)
                found["tokens"].append(np.column_stack([queries.values[positions], retrieved]))
                bar.update(len(positions))
            _write(folder, shard.number, {kind: np.concatenate(parts) for kind, parts in found.items()})
    return total


def _is_own_text(datastore: Datastore, queries: Datastore) -> bool:
    """Whether both are of the same split, however they were dumped: then a token could find itself."""
    texts = [store.manifest.source.get("data_sha256") for store in (datastore, queries)]
    return queries.fingerprint == datastore.fingerprint or (texts[0] == texts[1] and texts[0] is not None)


def corpus_positions(datastore: Datastore) -> np.ndarray | None:
    """Where the entries of a subsample stood in the corpus, (entries,); None: entry i is position i."""
    path = datastore.folder / POSITIONS
    return np.load(path, mmap_mode="r") if path.exists() else None


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
        places: positions of the entries, as ``corpus_positions`` has it
    """
    if positions is None:
        return _fill(*engine.search(queries, k), k)
    distances, ids = np.full((len(queries), k), np.inf, np.float32), np.full((len(queries), k), -1, np.int64)
    left, wanted, most = np.arange(len(queries)), 2 * k + 8, k + 2 * window + 1
    while len(left):
        wanted = min(wanted, most)
        near, found = engine.search(queries[left], wanted)
        stood = found if places is None else places[np.maximum(found, 0)]
        outside = (np.abs(stood - positions[left, None]) > window) & (found >= 0)
        order = np.argsort(~outside, axis=1, kind="stable")[:, :k]
        done = (outside.sum(axis=1) >= k) | (found[:, -1] < 0) | (found.shape[1] < wanted) | (wanted == most)
        rows, order = left[done], order[done]
        good = np.take_along_axis(outside[done], order, 1)
        width = slice(0, good.shape[1])
        ids[rows, width] = np.where(good, np.take_along_axis(found[done], order, 1), -1)
        distances[rows, width] = np.where(good, np.take_along_axis(near[done], order, 1), np.inf)
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
    if folder.exists() and not folder.is_dir():
        raise KnnlmError(f"{folder} is a file; choose another -o")
    if folder.exists() and any(not path.name.startswith(FACTS) for path in folder.iterdir()):
        raise KnnlmError(f"{folder} is not empty; choose another -o")
    folder.mkdir(parents=True, exist_ok=True)
    row = (facts.k + OWN) * sum(np.dtype(dtype).itemsize for dtype in KINDS.values())
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
