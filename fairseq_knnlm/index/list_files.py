"""What is written beside an index with inverted lists, so that nobody has to read the lists to know it.

    list_starts.npy   (lists + 1,) int64    the first row of each list; rows are counted through all lists
    run_starts.npy    (lists + 1,) int64    the first run of each list; a run is the entries of one value in a list
    run_values.npy    (runs,)               the value of each run, ascending in a list
    run_ends.npy      (runs,) int32         where each run ends, counted from the beginning of its list
    list_means.npy    (lists, dim) float32  the mean of each list's keys, where the lists hold the keys themselves
    list_spreads.npy  (lists,) float32      the mean squared distance of a list's keys from their mean
    list_weights.npy  (entries,) float32    the weight of each entry, list by list, where entries have weights
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..datastore import Datastore
from ..datastore.list_file import ListFile
from ..datastore.reader import LIST_STARTS
from ..errors import KnnlmError
from ..storage import file_sha256
from ..storage.arrays import check_array_file
from .info import INDEX_FILE, IndexInfo, index_folder, remedy_for

RUN_STARTS, RUN_VALUES, RUN_ENDS = "run_starts.npy", "run_values.npy", "run_ends.npy"
LIST_MEANS, LIST_SPREADS = "list_means.npy", "list_spreads.npy"
LIST_WEIGHTS = "list_weights.npy"
ALL_FILES = (LIST_STARTS, RUN_STARTS, RUN_VALUES, RUN_ENDS, LIST_MEANS, LIST_SPREADS, LIST_WEIGHTS)


@dataclass
class SortedLists:
    """The lists of an index that we wrote, open for reading."""

    folder: Path
    info: IndexInfo
    remedy: str
    value_dtype: str

    def _load(self, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        path = self.folder / name
        check_array_file(path, shape, dtype, self.remedy, "the index")
        if file_sha256(path) != (self.info.files or {}).get(name):
            raise KnnlmError(f"{path} is damaged (its checksum differs); {self.remedy}")
        # Mapped: whoever has a range of the lists, or no memory to spare, does not hold all of it. Torch wants arrays
        # that it might write to; what is written to this mapping stays in memory.
        return np.asarray(np.load(path, mmap_mode="c"))

    @cached_property
    def file(self) -> ListFile:
        starts = self._load(LIST_STARTS, (self.info.lists + 1,), "int64")
        return ListFile(self.folder / INDEX_FILE, self.info.head_bytes, self.info.code_bytes, starts)

    @cached_property
    def run_starts(self) -> np.ndarray:
        return self._load(RUN_STARTS, (self.info.lists + 1,), "int64")

    @cached_property
    def run_values(self) -> np.ndarray:
        return self._load(RUN_VALUES, (int(self.run_starts[-1]),), self.value_dtype)

    @cached_property
    def run_ends(self) -> np.ndarray:
        return self._load(RUN_ENDS, (int(self.run_starts[-1]),), "int32")

    @cached_property
    def means(self) -> np.ndarray:
        return self._load(LIST_MEANS, (self.info.lists, self.info.dim), "float32")

    @cached_property
    def spreads(self) -> np.ndarray:
        return self._load(LIST_SPREADS, (self.info.lists,), "float32")

    @cached_property
    def weights(self) -> np.ndarray | None:
        """Of the entries in the order of the rows, (entries,); None: each counts 1."""
        if LIST_WEIGHTS not in (self.info.files or {}):
            return None
        return self._load(LIST_WEIGHTS, (self.info.entries,), "float32")

    def run_values_of(self, number: int) -> np.ndarray:
        """The values of a list, ascending: (runs,)."""
        return self.run_values[self.run_starts[number] : self.run_starts[number + 1]]

    def run_ends_of(self, number: int) -> np.ndarray:
        """Where each run of a list ends: (runs,)."""
        return self.run_ends[self.run_starts[number] : self.run_starts[number + 1]]

    def weights_of(self, number: int) -> np.ndarray | None:
        """The weights of a list's entries, (m,); None: each counts 1."""
        if self.weights is None:
            return None
        return self.weights[self.file.starts[number] : self.file.starts[number + 1]]

    def run_counts_of(self, number: int) -> np.ndarray:
        """How much each run of a list counts: its entries, or the sum of their weights in double precision; (runs,)."""
        ends, weights = self.run_ends_of(number), self.weights_of(number)
        begins = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        if weights is None or not len(ends):
            return ends - begins
        return np.add.reduceat(weights, begins, dtype=np.float64)

    def runs_of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of some lists, one after the other: values (runs,), how much each run counts (runs,), runs per list (m,)."""
        runs, rows = _parts(self.run_starts, numbers)
        sizes = self.file.starts[numbers + 1] - self.file.starts[numbers]
        ends = self.run_ends[rows] + np.repeat(np.cumsum(sizes) - sizes, runs)  # counted through all of these lists
        if self.weights is None or not len(rows):
            return self.run_values[rows], np.diff(ends, prepend=0), runs
        weights = self.weights[_parts(self.file.starts, numbers)[1]].astype(np.float64)
        return self.run_values[rows], np.add.reduceat(weights, np.append(0, ends[:-1])), runs


def _parts(starts: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of some lists (m,): how many rows each has (m,), and these rows, one list after the other."""
    counts = starts[numbers + 1] - starts[numbers]
    return counts, np.arange(counts.sum()) + np.repeat(starts[numbers] - (np.cumsum(counts) - counts), counts)


def open_lists(datastore: Datastore, info: IndexInfo) -> SortedLists | None:
    """The lists of an index, if this or a later release has written them; None: FAISS has to be asked."""
    if not info.files or LIST_STARTS not in info.files:
        return None
    folder = index_folder(datastore, info.name)
    return SortedLists(folder, info, remedy_for(datastore, info), datastore.manifest.value_dtype)


def bytes_on_disk(datastore: Datastore, info: IndexInfo) -> int:
    """Of an index with what stands beside it."""
    return sum(file.stat().st_size for file in index_folder(datastore, info.name).iterdir() if file.is_file())


def knows_spreads(info: IndexInfo) -> bool:
    """Whether it is known how the keys of each list lie around their mean, which the far field goes by."""
    return LIST_SPREADS in (info.files or {})


def checksums(folder: Path) -> dict[str, str]:
    """Of the files in a folder that are beside the index."""
    return {name: file_sha256(folder / name) for name in ALL_FILES if (folder / name).exists()}
