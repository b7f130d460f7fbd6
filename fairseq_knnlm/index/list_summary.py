"""What stands beside inverted lists: made with every piece of the lists, and joined when all of them are written."""

from pathlib import Path

import faiss
import numpy as np

from ..datastore import Datastore
from ..datastore.list_file import from_codes
from ..datastore.reader import LIST_STARTS
from ..storage import OutputFile, write_array
from .info import stores_exact_keys
from .list_files import LIST_MEANS, LIST_SPREADS, LIST_WEIGHTS, RUN_ENDS, RUN_STARTS, RUN_VALUES

ROWS_PER_SUM = 1 << 14  # keys that are floats at once when means are computed


class ListSummary:
    """What is written beside the lists: runs of equal values, mean and spread of each list's keys, weights."""

    def __init__(self, datastore: Datastore, ivf: faiss.IndexIVF, lists: int):
        self._datastore, self._exact = datastore, stores_exact_keys(ivf, datastore)
        self._values: list[np.ndarray] = []
        self._ends: list[np.ndarray] = []
        self._runs = np.zeros(lists, np.int64)
        self._means = np.zeros((lists, datastore.dim), np.float32)
        self._spreads = np.zeros(lists, np.float32)
        self._weights: list[np.ndarray] = []

    def add(self, first_list: int, rows: np.ndarray, starts: np.ndarray) -> None:
        """rows: the entries of consecutive lists, starts: the first row of each of these lists, and the end."""
        changes = (np.diff(rows["list"]) != 0) | (np.diff(rows["value"]) != 0)
        ends = np.append(np.flatnonzero(changes) + 1, len(rows)) if len(rows) else np.empty(0, np.int64)
        last = rows[ends - 1]
        self._values.append(last["value"].astype(self._datastore.manifest.value_dtype))
        self._ends.append((ends - starts[last["list"] - first_list]).astype(np.int32))
        count = len(starts) - 1
        self._runs[first_list : first_list + count] = np.bincount(last["list"] - first_list, minlength=count)
        if self._datastore.weights is not None:
            self._weights.append(self._datastore.weights[rows["id"]])
        if self._exact:
            self._add_means(first_list, rows, starts)

    def _add_means(self, first_list: int, rows: np.ndarray, starts: np.ndarray) -> None:
        sizes = np.diff(starts)
        low = 0
        while low < len(sizes):
            high = max(low + 1, int(np.searchsorted(starts, starts[low] + ROWS_PER_SUM, side="right")) - 1)
            some, numbers = slice(starts[low], starts[high]), np.flatnonzero(sizes[low:high]) + low
            if len(numbers):
                keys = self._datastore.codec.decode(self._keys(rows["code"][some])).astype(np.float32)
                edges, counts = starts[numbers] - starts[low], sizes[numbers]
                means = np.add.reduceat(keys, edges) / counts[:, None]
                keys -= np.repeat(means, counts, axis=0)
                np.square(keys, out=keys)
                self._means[first_list + numbers] = means
                self._spreads[first_list + numbers] = np.add.reduceat(keys.sum(axis=1), edges) / counts
            low = high

    def _keys(self, codes: np.ndarray) -> np.ndarray:
        """Codes of keys as stored keys; a list may hold float32 where the datastore has float16."""
        dtype = np.dtype(self._datastore.manifest.key_dtype)
        if codes.shape[1] != self._datastore.dim * dtype.itemsize:
            dtype = np.dtype(np.float32)
        return from_codes(codes, dtype)

    def arrays(self) -> dict[str, np.ndarray]:
        """What is written, by the names of the files."""
        arrays = {
            RUN_STARTS: np.concatenate([[0], np.cumsum(self._runs)]),
            RUN_VALUES: np.concatenate(self._values),
            RUN_ENDS: np.concatenate(self._ends),
        }
        if self._datastore.is_weighted:
            arrays[LIST_WEIGHTS] = np.concatenate(self._weights)
        return {**arrays, LIST_MEANS: self._means, LIST_SPREADS: self._spreads} if self._exact else arrays

    def write(self, work: Path, piece: int) -> None:
        """Each array as a file of one piece of the index."""
        for name, array in self.arrays().items():
            write_array(side_file(work, piece, name), array)


def side_file(work: Path, piece: int, name: str) -> Path:
    return work / f"piece-{piece:05d}-{name}"


def join_sides(work: Path, starts: np.ndarray, pieces: int) -> None:
    """The files beside an index from those of its pieces, one piece in memory at a time.

    Args:
        starts: the first row of each list, and the end
    """
    write_array(work / LIST_STARTS, starts)
    for name in (RUN_VALUES, RUN_ENDS, LIST_MEANS, LIST_SPREADS, LIST_WEIGHTS):
        files = [side_file(work, piece, name) for piece in range(pieces)]
        if not files[0].exists():
            continue
        shapes = [np.load(path, mmap_mode="r").shape for path in files]
        with OutputFile(work / name) as file:
            rows = sum(shape[0] for shape in shapes)
            file.write_array_header((rows, *shapes[0][1:]), np.load(files[0], mmap_mode="r").dtype.str)
            for path in files:
                file.write(np.ascontiguousarray(np.load(path)))
    runs = [np.diff(np.load(side_file(work, piece, RUN_STARTS))) for piece in range(pieces)]
    write_array(work / RUN_STARTS, np.concatenate([[0], np.cumsum(np.concatenate(runs))]))
