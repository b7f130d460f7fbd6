"""The training text around an entry of a datastore."""

from pathlib import Path

import numpy as np
from fairseq.data import Dictionary, data_utils

from ..datastore import Datastore
from ..errors import KnnlmError


class Contexts:
    """The words that stood before an entry.

    Entry i is the i-th token of the corpus, so the values of a whole datastore are the corpus. A part of one has gaps,
    so there the corpus itself is read, where the manifest says it lies.
    """

    def __init__(self, datastore: Datastore, dictionary: Dictionary):
        self._datastore = datastore
        self._positions = datastore.positions
        if self._positions is None:
            return
        source = datastore.manifest.source
        path = Path(source.get("data", "")) / source.get("split", "train")
        lines = data_utils.load_indexed_dataset(str(path), dictionary) if path.parent.is_dir() else None
        if lines is None:
            raise KnnlmError(
                f"{datastore.folder} holds a part of its corpus, so the text around its entries is read from {path}, "
                "which is not there; put the binarised data back, or inspect the whole datastore"
            )
        self._lines, self._ends = lines, np.cumsum(lines.sizes)
        drawn = source["subsample"]
        if self._ends[-1] != drawn.get("of_corpus", drawn["of_entries"]):
            raise KnnlmError(f"{path} is not the text that {datastore.folder} was made from; put that back")

    def before(self, entry: int, count: int) -> list[int]:
        """Up to ``count`` tokens before an entry, oldest first."""
        if self._positions is None:
            return self._datastore.values[max(0, entry - count) : entry].tolist()
        stop = int(self._positions[entry])
        start = max(0, stop - count)
        tokens: list[int] = []
        line = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            first = int(self._ends[line]) - len(self._lines[line])
            piece = self._lines[line][start - first : stop - first].tolist()
            tokens, start, line = tokens + piece, start + len(piece), line + 1
        return tokens
