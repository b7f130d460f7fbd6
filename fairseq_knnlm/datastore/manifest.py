"""The format of a datastore: its files, and the manifest that describes them.

    DIR/manifest.json                     what it is, where it came from, the shards, complete or not
    DIR/keys-00000.npy   (rows, dim)      float16, float32 or int8 (see ``key_codec``)
    DIR/values-00000.npy (rows,)          uint16 or int32
    DIR/weights-00000.npy (rows,)         float32, only where entries have weights
    DIR/index/<name>/                     see the package ``index``
    DIR/positions.npy    (entries,)       only in a subsample: which token of the corpus each entry is
    DIR/projection.npy, DIR/quantizer.npy only with compact keys, see ``key_codec``

Entry i is the i-th predicted token of the corpus. The split of the entries into shards is fixed when the datastore is
created, so several processes can fill different shards of one folder, and a killed one loses the shard under way only.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import KnnlmError
from ..storage import from_record, read_versioned, write_record
from .key_codec import Projection, Quantizer

FORMAT = "fairseq-knnlm datastore"
VERSION = 3
READABLE_VERSIONS = (1, 2, 3)  # the first has no compact keys, and keys always in the shards; the second no weights
MANIFEST = "manifest.json"
POSITIONS = "positions.npy"
KEY_DTYPES = ("float16", "float32", "int8")
VALUE_DTYPES = ("uint16", "int32")
WEIGHT_DTYPE = "float32"


def value_dtype_for(vocabulary_size: int) -> str:
    """The smallest dtype that holds every token number."""
    return "uint16" if vocabulary_size <= 1 << 16 else "int32"


@dataclass
class Shard:
    """The files of some entries. The checksums are None until it is written."""

    number: int
    start: int  # first entry
    rows: int
    keys_sha256: str | None = None
    values_sha256: str | None = None
    weights_sha256: str | None = None  # None also where entries have no weights

    @property
    def stop(self) -> int:
        return self.start + self.rows

    @property
    def keys_name(self) -> str:
        return f"keys-{self.number:05d}.npy"

    @property
    def values_name(self) -> str:
        return f"values-{self.number:05d}.npy"

    @property
    def weights_name(self) -> str:
        return f"weights-{self.number:05d}.npy"

    @property
    def receipt_name(self) -> str:
        """Says that the shard is whole, and its checksums, until the manifest does."""
        return f"shard-{self.number:05d}.json"

    @property
    def lock_name(self) -> str:
        """Held by the process that writes the shard."""
        return f"shard-{self.number:05d}.lock"


@dataclass
class Manifest:
    """Everything anyone needs to know about a datastore; nobody types a size."""

    entries: int
    dim: int
    key_dtype: str
    value_dtype: str
    key: str
    layer: int
    source: dict[str, Any]  # split, data, fingerprints of data, dictionary and checkpoint, context
    shards: list[Shard] = field(default_factory=list)
    complete: bool = False
    projection: Projection | None = None  # None: keys have the dimensions of the model's states
    quantizer: Quantizer | None = None  # of int8 keys
    keys_in_index: str | None = None  # the index that alone holds the keys; None: they are in the shards
    weighted: bool = False  # whether every entry has a weight; without, each counts 1
    format: str = FORMAT
    version: int = VERSION

    @property
    def source_dim(self) -> int:
        """Dimensions of the states that the keys were made of."""
        return self.projection.source_dim if self.projection else self.dim

    @property
    def entry_bytes(self) -> int:
        """Of a key, its value and its weight."""
        dtypes = [self.value_dtype, *([WEIGHT_DTYPE] if self.weighted else [])]
        return self.dim * np.dtype(self.key_dtype).itemsize + sum(np.dtype(dtype).itemsize for dtype in dtypes)

    def identity(self) -> dict[str, Any]:
        """What must agree for a dump to be continued."""
        names = ("entries", "dim", "source_dim", "key_dtype", "value_dtype", "key", "layer", "weighted")
        facts = {name: getattr(self, name) for name in names}
        source = {name: value for name, value in self.source.items() if name != "data"}  # a moved folder is no change
        return {**facts, **source}

    def save(self, folder: Path) -> None:
        write_record(folder / MANIFEST, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        path = folder / MANIFEST
        content = read_versioned(path, FORMAT, READABLE_VERSIONS, "create it with fairseq-eval-lm --knn-dump")
        remedy = f"restore it from a copy, or delete {folder} and dump it again"
        shards = content.get("shards")
        if not isinstance(shards, list) or not all(isinstance(shard, dict) for shard in shards):
            raise KnnlmError(f"{path} is damaged (it lists no shards); {remedy}")
        content["shards"] = [from_record(Shard, shard, path, remedy) for shard in shards]
        for name, cls_of_field in (("projection", Projection), ("quantizer", Quantizer)):
            if isinstance(content.get(name), dict):
                content[name] = from_record(cls_of_field, content[name], path, remedy)
        manifest = from_record(cls, content, path, remedy)
        if problem := manifest._contradiction():
            raise KnnlmError(f"{path} is damaged ({problem}); {remedy}")
        return manifest

    def _contradiction(self) -> str:
        """What cannot be true of any datastore; empty if nothing is."""
        if self.key_dtype not in KEY_DTYPES or self.value_dtype not in VALUE_DTYPES:
            return f"keys of {self.key_dtype}, values of {self.value_dtype}"
        if (self.key_dtype == "int8") != (self.quantizer is not None):
            return f"keys of {self.key_dtype} {'without' if self.quantizer is None else 'with'} 8-bit ranges"
        if self.projection is not None and not self.dim < self.projection.source_dim:
            return f"{self.projection.source_dim} dimensions projected to {self.dim}"
        planned = plan_shards([shard.rows for shard in self.shards])
        if [(s.number, s.start) for s in planned] != [(s.number, s.start) for s in self.shards]:
            return "its shards do not follow each other"
        rows = [shard.rows for shard in self.shards]
        if sum(rows) != self.entries or min(rows, default=0) < 1:
            return f"its shards do not make {self.entries:,} entries"
        if self.complete and any(None in (shard.keys_sha256, shard.values_sha256) for shard in self.shards):
            return "a checksum is missing"
        if self.complete and any((shard.weights_sha256 is not None) != self.weighted for shard in self.shards):
            return "the weights of some shards are missing or too many"
        return "" if self.dim > 0 else f"the dimension is {self.dim}"


def plan_shards(row_counts: list[int]) -> list[Shard]:
    """Consecutive shards of so many rows."""
    starts = np.cumsum([0, *row_counts[:-1]])
    return [Shard(number, int(start), int(rows)) for number, (start, rows) in enumerate(zip(starts, row_counts))]
