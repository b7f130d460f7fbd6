"""Weights of entries beside the raw files: of merged entries, how many each stands for (He et al. 2021)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..datastore.reader import check_weights
from ..errors import KnnlmError
from .raw_files import DamagedStoreError, RawFile
from .raw_layout import RawLayout

LARGEST_COUNT = 1 << 26  # the bits of a float of 1e-36 or more, read as an integer, are a larger number
SAMPLE_ROWS = 1 << 16
DTYPES = {4: ("int32", "float32"), 8: ("int64", "float64")}  # by bytes of a number: counts, or else floats


@dataclass(frozen=True)
class RawWeights:
    """PREFIX_weights.npy, with what its numbers are."""

    file: RawFile
    dtype: str

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The weights of the entries [start, stop), (n,) float32."""
        weights = self.file.rows(self.dtype, 1, start, stop)[:, 0].astype(np.float32)
        if not check_weights(weights):
            raise DamagedStoreError(
                f"{self.file.path} holds weights that are not positive numbers; restore it, or move it away to import "
                "without weights"
            )
        return weights


def open_weights(path: Path, layout: RawLayout, values: RawFile) -> RawWeights | None:
    """The weights of the entries, if there are any: counts or floats, as many as there are values."""
    if not path.exists():
        return None
    file, entries = RawFile(path), values.bytes // np.dtype(layout.value_dtype).itemsize
    choices = DTYPES.get(file.bytes // max(1, entries))
    if choices is None or file.bytes % max(1, entries):
        raise KnnlmError(
            f"{path} has {file.bytes:,} bytes, which are no weights of 4 or 8 bytes for {entries:,} entries; restore "
            "it, or move it away to import without weights"
        )
    counts, floats = choices
    sample = file.rows(counts, 1, 0, min(layout.entries, SAMPLE_ROWS))
    is_count = sample.min() >= 1 and sample.max() < LARGEST_COUNT
    return RawWeights(file, counts if is_count else floats)
