"""A complete datastore, open for reading."""

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from ..errors import KnnlmError
from ..storage import ShardedArray, file_sha256, read_json
from ..storage.arrays import map_array
from .key_codec import PROJECTION, QUANTIZER, KeyCodec, LearntCodec
from .list_file import KeysInLists, ListFile
from .manifest import POSITIONS, WEIGHT_DTYPE, Manifest, Shard

LIST_STARTS = "list_starts.npy"  # in the folder of an index whose lists we wrote: see list_file


class Datastore:
    """Keys are mapped when they are used; values are read into memory when first used."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest = Manifest.load(self.folder)
        if not self.manifest.complete:
            done = sum(1 for shard in self.manifest.shards if (self.folder / shard.receipt_name).exists())
            raise KnnlmError(
                f"{self.folder} is incomplete ({done} of {len(self.manifest.shards)} shards); "
                "run the same command (fairseq-eval-lm --knn-dump, knnlm compact, subsample, prune or import) again to "
                "finish it"
            )
        remedy = f"restore it from a copy, or delete {self.folder} and dump it again"
        rows, manifest = [shard.rows for shard in self.shards], self.manifest
        keys, values = [s.keys_name for s in self.shards], [s.values_name for s in self.shards]
        self._keys: ShardedArray | KeysInLists
        try:
            self._keys = self._open_keys(keys, rows, remedy)
        except KnnlmError:
            self.manifest = manifest = Manifest.load(self.folder)  # perhaps knnlm build --drop-keys is at work
            if manifest.keys_in_index is None:
                raise
            self._keys = self._open_keys(keys, rows, remedy)
        self._values = ShardedArray(self.folder, values, rows, (), manifest.value_dtype, remedy, "the manifest")
        self._weights: ShardedArray | None = None
        if manifest.weighted:
            weights = [shard.weights_name for shard in self.shards]
            self._weights = ShardedArray(self.folder, weights, rows, (), WEIGHT_DTYPE, remedy, "the manifest")

    def _open_keys(self, names: list[str], rows: list[int], remedy: str) -> ShardedArray | KeysInLists:
        dtype = self.manifest.key_dtype
        if self.manifest.keys_in_index is not None:
            return KeysInLists(self._open_lists(self.manifest.keys_in_index, remedy), self.dim, dtype)
        return ShardedArray(self.folder, names, rows, (self.dim,), dtype, remedy, "the manifest")

    def _open_lists(self, index: str, remedy: str) -> ListFile:
        """The lists of the index that alone holds the keys."""
        folder = self.folder / "index" / index
        facts = read_json(folder / "index.json", remedy)
        head, lists, code = (facts.get(name) for name in ("head_bytes", "lists", "code_bytes"))
        if not (isinstance(head, int) and isinstance(lists, int) and isinstance(code, int)):
            raise KnnlmError(f"{folder / 'index.json'} does not say where the keys are, so it is damaged; {remedy}")
        starts = map_array(folder / LIST_STARTS, (lists + 1,), "int64", remedy)
        return ListFile(folder / "index.faiss", head, code, np.array(starts))

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
        """Identifies the keys and their weights, so that an index knows which datastore it was built from."""
        parts = (f"{shard.keys_sha256 or ''}{shard.weights_sha256 or ''}" for shard in self.shards)
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    @property
    def bytes_on_disk(self) -> int:
        return self._keys.nbytes + self._values.nbytes + (self._weights.nbytes if self._weights else 0)

    @property
    def value_bytes(self) -> int:
        return np.dtype(self.manifest.value_dtype).itemsize

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

    def read_values(self, start: int, stop: int) -> np.ndarray:
        """The values of the entries [start, stop), read from disk."""
        return self._values.read(start, stop)

    def values_of(self, ids: np.ndarray) -> np.ndarray:
        """The values of the given entries, in ids' shape. A missing neighbour (id -1) gets any value."""
        try:
            return self.values[np.maximum(ids, 0)]
        except IndexError as error:
            raise self._no_such_entry() from error

    @property
    def is_weighted(self) -> bool:
        """Whether entries have weights; without, each counts 1."""
        return self._weights is not None

    @cached_property
    def weights(self) -> np.ndarray | None:
        """The weights of all entries, (entries,) float32, in memory: 4 bytes per entry; None: each counts 1."""
        if self._weights is None:
            return None
        weights = self._weights.read(0, len(self))
        if not check_weights(weights):
            raise KnnlmError(
                f"{self.folder} has weights that are not positive numbers, so a file is damaged; find it with "
                "knnlm verify"
            )
        return weights

    def read_weights(self, start: int, stop: int) -> np.ndarray | None:
        """The weights of the entries [start, stop), read from disk; None: each counts 1."""
        return None if self._weights is None else self._weights.read(start, stop)

    def log_weights_of(self, ids: np.ndarray) -> np.ndarray | None:
        """Log of the weights of the given entries, in ids' shape, float32; None: each is 0. An id of -1 gets any."""
        if self.weights is None:
            return None
        try:
            return np.log(self.weights[np.maximum(ids, 0)])
        except IndexError as error:
            raise self._no_such_entry() from error

    @cached_property
    def codec(self) -> KeyCodec:
        """From the model's states to stored keys, and back."""
        return KeyCodec.load(self.folder, self.manifest)

    def own_codec(self) -> LearntCodec:
        """The codec and what the manifest says of it, for a datastore with keys of the same form."""
        return self.codec, self.manifest.projection, self.manifest.quantizer

    def key_blocks(self, rows: int = 1 << 16, start: int = 0) -> Iterator[np.ndarray]:
        """Stream the keys as floats in order from entry ``start``, at most ``rows`` at once."""
        return (self.codec.decode(block) for block in self.stored_blocks(rows, start))

    def read_keys(self, start: int, stop: int) -> np.ndarray:
        """The keys of the entries [start, stop) as floats, read from disk."""
        return self.codec.decode(self.read_stored(start, stop))

    def read_stored(self, start: int, stop: int) -> np.ndarray:
        """As ``read_keys``, in the stored dtype."""
        return np.concatenate(list(self._keys.blocks(max(1, stop - start), start, stop)))

    def stored_blocks(self, rows: int = 1 << 16, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """As ``key_blocks``, in the stored dtype, up to entry ``stop`` and without it."""
        return self._keys.blocks(rows, start, stop)

    def gather_keys(self, ids: np.ndarray) -> np.ndarray:
        """Keys of the given entries: ids (n,) -> (n, dim), as floats: 16 bits where they are stored so, else 32."""
        return self.codec.decode(self.gather_stored(ids))

    def gather_stored(self, ids: np.ndarray) -> np.ndarray:
        """As ``gather_keys``, in the stored dtype."""
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
        """Where the entries of a part of a corpus stood in it, (entries,); None: entry i is position i."""
        path = self.folder / POSITIONS
        if not path.exists() and "subsample" not in self.manifest.source:
            return None
        return map_array(path, (len(self),), "int64", f"delete {self.folder} and run knnlm subsample or prune again")

    def damaged_files(self) -> Iterator[tuple[str, bool]]:
        """Compare every file but the manifest with its checksum: yields (name, is damaged), one file at a time."""
        expected: dict[str, str | None] = {}
        if self.manifest.keys_in_index is None:
            expected |= {shard.keys_name: shard.keys_sha256 for shard in self.shards}
        if self.manifest.projection is not None:
            expected[PROJECTION] = self.manifest.projection.sha256
        if self.manifest.quantizer is not None:
            expected[QUANTIZER] = self.manifest.quantizer.sha256
        expected |= {shard.values_name: shard.values_sha256 for shard in self.shards}
        if self.manifest.weighted:
            expected |= {shard.weights_name: shard.weights_sha256 for shard in self.shards}
        drawn = self.manifest.source.get("subsample", {})
        if "positions_sha256" in drawn:
            expected[POSITIONS] = drawn["positions_sha256"]
        for name, sha256 in sorted(expected.items()):
            yield name, file_sha256(self.folder / name) != sha256


def check_weights(weights: np.ndarray) -> bool:
    """Whether these can be weights of entries: a logarithm is taken of each."""
    return bool(np.isfinite(weights).all() and (weights > 0).all())
