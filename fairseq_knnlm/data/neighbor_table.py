"""For every token of a split the tokens that followed its nearest stored contexts: computed once, read in training.

    DIR/neighbors.json                  which queries, which datastore, K, what was left out
    DIR/tokens-00000.npy  (rows, 1 + K) the token itself, then the retrieved output tokens, nearest first, -1: none
    DIR/ids-00000.npy     (rows, K)     their entries in the datastore
    DIR/distances-00000.npy (rows, K)   float32
    DIR/log_weights-00000.npy (rows, K) float32: log of the entries' weights, where the datastore has any
    DIR/shard-00000.json                checksums of these, written last: the shard is whole

A shard is a shard of the queries, which are a datastore of the split (fairseq-eval-lm --knn-dump). A row begins with
its own token, so that a table that has slipped against its text is noticed.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import KnnlmError
from ..storage import (
    Lock,
    ShardedArray,
    check_disk_space,
    from_record,
    make_folder,
    read_json,
    read_versioned,
    remove_stale_files,
    write_array,
    write_json,
    write_record,
)

FORMAT = "fairseq-knnlm neighbor-table"
VERSION = 1
FACTS = "neighbors.json"
KINDS = {"tokens": "int32", "ids": "int64", "distances": "float32"}
LOG_WEIGHTS = "log_weights"
ROWS_PER_BLOCK = 1 << 16
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
    receipts: bool = False  # whether each shard has one; tables of older releases have none
    weighted: bool = False  # whether the entries of the datastore have weights
    format: str = FORMAT
    version: int = VERSION

    @property
    def kinds(self) -> dict[str, str]:
        """The arrays of each shard and their dtypes."""
        return {**KINDS, LOG_WEIGHTS: "float32"} if self.weighted else KINDS


class NeighborTable:
    """A finished table, open for reading."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        remedy = "make it with knnlm neighbors"
        content = read_versioned(self.folder / FACTS, FORMAT, VERSION, remedy)
        again = f"delete {self.folder} and {remedy} again"
        self.facts = from_record(NeighborFacts, content, self.folder / FACTS, again)
        receipts = self.facts.receipts
        missing = [number for number in range(len(self.facts.rows)) if not is_done(self.folder, number, receipts)]
        if missing:
            raise KnnlmError(
                f"{self.folder} is incomplete ({len(missing)} of {len(self.facts.rows)} shards are missing); run the "
                "same knnlm neighbors command again"
            )
        self.k, rows = self.facts.k, self.facts.rows
        if self.k < 1 or min(rows, default=0) < 1:
            raise KnnlmError(f"{self.folder / FACTS} is damaged (K = {self.k}); {again}")
        remedy = "delete it and run knnlm neighbors again"
        self._arrays = {
            kind: ShardedArray(
                self.folder, [_name(kind, number) for number in range(len(rows))], rows,
                (self.k + (OWN if kind == "tokens" else 0),), dtype, remedy,
            )
            for kind, dtype in self.facts.kinds.items()
        }  # fmt: skip

    def __len__(self) -> int:
        return sum(self.facts.rows)

    def _read(self, kind: str, start: int, stop: int) -> np.ndarray:
        return self._arrays[kind].read(max(0, start), min(stop, len(self)))

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

    def log_weights(self, start: int, stop: int) -> np.ndarray | None:
        """Log of the entries' weights, (rows, K); None: each counts 1."""
        return self._read(LOG_WEIGHTS, start, stop) if self.facts.weighted else None

    def gather(self, kind: str, rows: np.ndarray) -> np.ndarray:
        """Rows of any numbers of an array of the table (KINDS), as they are stored: (n,) -> (n, K or 1 + K)."""
        return self._arrays[kind].gather(rows)

    def check_text(self, text: np.ndarray) -> None:
        """Refuse a table whose rows do not belong to these tokens (n,), one for one."""
        first = 0
        for array in self._arrays["tokens"].blocks(ROWS_PER_BLOCK):
            wrong = np.flatnonzero(array[:, 0] != text[first : first + len(array)])
            if len(wrong):
                raise KnnlmError(
                    f"{self.folder} does not fit the text: row {first + wrong[0]:,} belongs to another token, so the "
                    "table has slipped or is of another text; run knnlm neighbors for it again"
                )
            first += len(array)

    def shares_of_target(self) -> np.ndarray:
        """How often the first neighbour is the token itself, how often one of the first two, ...: (K,)."""
        found = np.zeros(self.k)
        for array in self._arrays["tokens"].blocks(ROWS_PER_BLOCK):
            found += np.logical_or.accumulate(array[:, OWN:] == array[:, :1], axis=1).sum(axis=0)
        return found / len(self)


def _name(kind: str, number: int) -> str:
    return f"{kind}-{number:05d}.npy"


def receipt_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.json"


def is_done(folder: Path, number: int, receipts: bool = True) -> bool:
    """Whether a shard is whole: its receipt is written last. A user may have deleted a damaged file."""
    arrays = all((folder / _name(kind, number)).exists() for kind in KINDS)
    return arrays and (not receipts or receipt_path(folder, number).exists())


def table_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Every array of a table with the checksum that it should have, as far as it was recorded."""
    for receipt in sorted(folder.glob("shard-*.json")):
        content = read_json(receipt, "delete it and run knnlm neighbors again")
        for kind, expected in content.items() if isinstance(content, dict) else ():
            if kind in (*KINDS, LOG_WEIGHTS):
                yield _name(kind, int(receipt.stem.split("-")[1])), str(expected)


def is_complete(folder: str | Path) -> bool:
    folder = Path(folder)
    content = read_versioned(folder / FACTS, FORMAT, VERSION, "make it with knnlm neighbors")
    receipts = content.get("receipts", False)
    return all(is_done(folder, number, receipts) for number in range(len(content["rows"])))


def open_table_folder(folder: Path, facts: NeighborFacts) -> None:
    """Create the folder of a table, or continue what is there if it is the same table."""
    make_folder(folder)
    if not (folder / FACTS).exists():
        _refuse_foreign_files(folder)
    with Lock(folder / f"{FACTS}.lock", f"writing {folder / FACTS}"):
        if (folder / FACTS).exists():
            present = read_versioned(folder / FACTS, FORMAT, VERSION, "make it with knnlm neighbors")
            if {"weighted": False, **present} != asdict(facts):  # tables of older releases do not say
                raise KnnlmError(f"{folder} holds other neighbours; choose another -o, or delete it")
        else:
            _refuse_foreign_files(folder)
            row = (facts.k + OWN) * sum(np.dtype(dtype).itemsize for dtype in facts.kinds.values())
            check_disk_space(folder, sum(facts.rows) * row, "the table of neighbours")
            write_record(folder / FACTS, asdict(facts))
        remove_stale_files(folder)


def _refuse_foreign_files(folder: Path) -> None:
    if any(not path.name.startswith(FACTS) for path in folder.iterdir()):
        raise KnnlmError(f"{folder} is not empty; choose another -o")


def write_shard(folder: Path, number: int, arrays: dict[str, np.ndarray]) -> None:
    dtypes = {**KINDS, LOG_WEIGHTS: "float32"}
    checksums = {
        kind: write_array(folder / _name(kind, number), array.astype(dtypes[kind])) for kind, array in arrays.items()
    }
    write_json(receipt_path(folder, number), checksums)
