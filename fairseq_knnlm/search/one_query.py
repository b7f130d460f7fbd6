"""One query and all entries of some lists, as generation asks for them: FAISS's own scan of its codes.

For a single query the entries are read from memory once and used once, so what counts is not to copy them: FAISS
computes distances from the codes as they stand in the mapped file, several times as fast as decoding them to floats.
"""

from typing import Any, NamedTuple

import faiss
import numpy as np
from torch import Tensor

from ..errors import KnnlmError
from ..index.info import extract_ivf
from ..machine import available_memory
from .list_blocks import FileLists


class Runs(NamedTuple):
    """The values of a list's entries, without the entries."""

    values: np.ndarray  # (runs,) ascending; a run is the entries of one value
    ends: np.ndarray  # (runs,) where each run ends
    weights: Tensor | None  # (m,) of the entries; None: each counts 1


class OneQueryScan:
    """Distances of one query to every entry of lists that we wrote, in the order of the file."""

    def __init__(self, index: faiss.Index | None, lists: FileLists, metric: str):
        ivf = None if index is None else extract_ivf(index)
        if ivf is None:
            raise KnnlmError("the index has no inverted lists; use --knn-index auto")
        self._index, self._ivf, self._lists = index, ivf, lists  # the index owns the memory that ``ivf`` points to
        self._is_large = lists.bytes >= available_memory()
        largest = float(np.finfo(np.float32).max)
        self._anything = -largest if metric == "ip" else largest  # a radius that every entry is within

    def __call__(self, query: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[Runs]]:
        """query (1, dim), ascending lists that are not empty (m,) -> distances (n,), ids (n,), runs of each list."""
        if self._is_large:  # else it was read into memory when it was opened
            self._lists.will_need(numbers)
        self._ivf.nprobe, self._ivf.parallel_mode = len(numbers), 0  # in one thread, so that lists come in order
        distances_to_centroids = np.zeros((1, len(numbers)), np.float32)  # which matter to codes of residuals only
        search: Any = self._ivf.range_search_preassigned  # its types are those of C++, which Python's wrapper hides
        query = np.ascontiguousarray(query, np.float32)
        _, distances, ids = search(query, self._anything, numbers[None].astype(np.int64), distances_to_centroids)
        lists = self._lists
        return distances, ids, [Runs(*lists.runs(number), lists.weights(number)) for number in numbers.tolist()]
