"""A complete datastore, open for reading."""

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from ..errors import KnnlmError
from ..storage import ShardedArray, file_sha256
from ..storage.arrays import map_array
from .manifest import POSITIONS, Manifest, Shard


class Datastore:
    """Keys are mapped when they are used; values are read into memory when first used."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest = Manifest.load(self.folder)
        if not self.manifest.complete:
            done = sum(1 for shard in self.manifest.shards if (self.folder / shard.receipt_name).exists())
            raise KnnlmError(
                f"{self.folder} is incomplete ({done} of {len(self.manifest.shards)} shards); "
                "run the same command (fairseq-eval-lm --knn-dump, knnlm subsample or import) again to finish it"
            )
        remedy = f"restore it from a copy, or delete {self.folder} and dump it again"
        rows, manifest = [shard.rows for shard in self.shards], self.manifest
        keys, values = [s.keys_name for s in self.shards], [s.values_name for s in self.shards]
        self._keys = ShardedArray(self.folder, keys, rows, (self.dim,), manifest.key_dtype, remedy, "the manifest")
        self._values = ShardedArray(self.folder, values, rows, (), manifest.value_dtype, remedy, "the manifest")

    def __len__(self) -> int:
        return self.manifest.entries

    @property
    def dim(self) -> int:
        return self.manifest.dim

    @property
    def shards(self) -> list[Shard]:
        return self.manifest.shards

    @property
    def fingerprint(self) -> str:
        """Identifies the keys, so that an index knows which datastore it was built from."""
        return hashlib.sha256("".join(shard.keys_sha256 or "" for shard in self.shards).encode()).hexdigest()

    @property
    def bytes_on_disk(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    @cached_property
    def values(self) -> np.ndarray:
        """All values, (entries,), in memory: 2 or 4 bytes per entry."""
        values = self._values.read(0, len(self))
        vocabulary = self.manifest.source.get("dictionary_size")
        if isinstance(vocabulary, int) and values.max() >= vocabulary:
            raise KnnlmError(
                f"{self.folder} holds tokens outside its dictionary of {vocabulary:,} types, so a file is damaged; "
                "find it with knnlm verify"
            )
        return values

    def values_of(self, ids: np.ndarray) -> np.ndarray:
        """The values of the given entries, in ids' shape. A missing neighbour (id -1) gets any value."""
        try:
            return self.values[np.maximum(ids, 0)]
        except IndexError as error:
            raise self._no_such_entry() from error

    def key_blocks(self, rows: int = 1 << 16, start: int = 0) -> Iterator[np.ndarray]:
        """Stream the stored keys in order from entry ``start``, at most ``rows`` at once."""
        return self._keys.blocks(rows, start)

    def gather_keys(self, ids: np.ndarray) -> np.ndarray:
        """Keys of the given entries: ids (n,) -> (n, dim) in the stored dtype."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(self):
            raise self._no_such_entry()
        return self._keys.gather(ids)

    def _no_such_entry(self) -> KnnlmError:
        return KnnlmError(
            f"an index of {self.folder} names entries that the datastore does not have, so a file is damaged; find it "
            "with knnlm verify"
        )

    @cached_property
    def positions(self) -> np.ndarray | None:
        """Where the entries of a subsample stood in the corpus, (entries,); None: entry i is position i."""
        path = self.folder / POSITIONS
        if not path.exists() and "subsample" not in self.manifest.source:
            return None
        return map_array(path, (len(self),), "int64", f"delete {self.folder} and run knnlm subsample again")

    def damaged_files(self) -> Iterator[tuple[str, bool]]:
        """Compare every file but the manifest with its checksum: yields (name, is damaged), one file at a time."""
        expected = {shard.keys_name: shard.keys_sha256 for shard in self.shards}
        expected |= {shard.values_name: shard.values_sha256 for shard in self.shards}
        drawn = self.manifest.source.get("subsample", {})
        if "positions_sha256" in drawn:
            expected[POSITIONS] = drawn["positions_sha256"]
        for name, sha256 in sorted(expected.items()):
            yield name, file_sha256(self.folder / name) != sha256
