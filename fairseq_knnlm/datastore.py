"""The datastore on disk: a manifest, and key and value shards as ordinary ``.npy`` files.

    DIR/manifest.json                     what it is, where it came from, the shards, complete or not
    DIR/keys-00000.npy   (rows, dim)      float16 or float32
    DIR/values-00000.npy (rows,)          uint16 or int32
    DIR/index/<name>/                     see index.py
    DIR/positions.npy    (entries,)       only in a subsample: which token of the corpus each entry is

Entry i is the i-th predicted token of the corpus. The split of the entries into shards is fixed when the datastore is
created, so several processes can fill different shards of one folder, and a killed one loses the shard under way only.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .errors import KnnlmError
from .files import check_disk_space, disk_full, file_sha256, read_json, read_versioned, write_json

FORMAT = "fairseq-knnlm datastore"
VERSION = 1
MANIFEST = "manifest.json"
POSITIONS = "positions.npy"


def value_dtype_for(vocabulary_size: int) -> str:
    """The smallest dtype that holds every token number."""
    return "uint16" if vocabulary_size <= 1 << 16 else "int32"


@dataclass
class Shard:
    """One pair of files. The checksums are None until it is written."""

    number: int
    start: int  # first entry
    rows: int
    keys_sha256: str | None = None
    values_sha256: str | None = None

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
    def receipt_name(self) -> str:
        """Says that the shard is whole, and its checksums, until the manifest does."""
        return f"shard-{self.number:05d}.json"


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
    format: str = FORMAT
    version: int = VERSION

    def identity(self) -> dict[str, Any]:
        """What must agree for a dump to be continued."""
        facts = {name: getattr(self, name) for name in ("entries", "dim", "key_dtype", "value_dtype", "key", "layer")}
        source = {name: value for name, value in self.source.items() if name != "data"}  # a moved folder is no change
        return {**facts, **source}

    def save(self, folder: Path) -> None:
        write_json(folder / MANIFEST, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        path = folder / MANIFEST
        content = read_versioned(path, FORMAT, VERSION, "create it with fairseq-eval-lm --knn-dump")
        try:
            shards = [Shard(**shard) for shard in content.pop("shards")]
            return cls(shards=shards, **content)
        except (TypeError, KeyError) as error:
            raise KnnlmError(f"{path} is damaged ({error}); delete {folder} and dump it again") from error


def plan_shards(row_counts: list[int]) -> list[Shard]:
    starts = np.cumsum([0, *row_counts[:-1]])
    return [Shard(number, int(start), int(rows)) for number, (start, rows) in enumerate(zip(starts, row_counts))]


class Datastore:
    """A complete datastore, open for reading. Keys stay memory-mapped; values are read when first used."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest = Manifest.load(self.folder)
        if not self.manifest.complete:
            done = sum(1 for shard in self.manifest.shards if (self.folder / shard.receipt_name).exists())
            raise KnnlmError(
                f"{self.folder} is incomplete ({done} of {len(self.manifest.shards)} shards); "
                "run the same fairseq-eval-lm --knn-dump command again to finish it"
            )
        self._starts = np.array([shard.start for shard in self.shards])
        self._keys = [self._map(s.keys_name, (s.rows, self.dim), self.manifest.key_dtype) for s in self.shards]
        self._values = [self._map(s.values_name, (s.rows,), self.manifest.value_dtype) for s in self.shards]

    def _map(self, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        path = self.folder / name
        remedy = f"; restore it from a copy, or delete {self.folder} and dump it again"
        if not path.exists():
            raise KnnlmError(f"{path} is missing{remedy}")
        try:
            array = np.load(path, mmap_mode="r")
        except (ValueError, OSError, EOFError) as error:
            raise KnnlmError(f"{path} is truncated or damaged ({error}){remedy}") from error
        if array.shape != shape or array.dtype != np.dtype(dtype):
            raise KnnlmError(
                f"{path} holds {array.dtype} {array.shape} but the manifest says {dtype} {shape}{remedy}"
            )
        return array

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
        return hashlib.sha256("".join(shard.keys_sha256 for shard in self.shards).encode()).hexdigest()

    @property
    def bytes_on_disk(self) -> int:
        return sum(array.nbytes for array in [*self._keys, *self._values])

    @cached_property
    def values(self) -> np.ndarray:
        """All values, (entries,), in memory: 2 or 4 bytes an entry."""
        return np.concatenate(self._values)

    def key_blocks(self, rows: int = 1 << 16, start: int = 0) -> Iterator[np.ndarray]:
        """Stream the stored keys in order from entry ``start``, at most ``rows`` at once.

        They are read, not mapped: mapped pages would count as memory of this process until the system needs them.
        """
        for shard, keys in zip(self.shards, self._keys):
            first = max(start - shard.start, 0)
            if first >= shard.rows:
                continue
            with open(self.folder / shard.keys_name, "rb") as file:
                file.seek(keys.offset + first * keys.strides[0])
                for row in range(first, shard.rows, rows):
                    count = min(rows, shard.rows - row) * self.dim
                    yield np.fromfile(file, keys.dtype, count).reshape(-1, self.dim)

    def gather_keys(self, ids: np.ndarray) -> np.ndarray:
        """Keys of the given entries: ids (n,) -> (n, dim) in the stored dtype."""
        keys = np.empty((len(ids), self.dim), self.manifest.key_dtype)
        shard_of = np.searchsorted(self._starts, ids, side="right") - 1
        for number in np.unique(shard_of):
            rows = np.flatnonzero(shard_of == number)
            keys[rows] = self._keys[number][ids[rows] - self._starts[number]]
        return keys

    def damaged_files(self) -> Iterator[tuple[str, bool]]:
        """Compare every file with its checksum: yields (name, is damaged), one file at a time."""
        for shard in self.shards:
            for name, expected in ((shard.keys_name, shard.keys_sha256), (shard.values_name, shard.values_sha256)):
                yield name, file_sha256(self.folder / name) != expected


class DatastoreWriter:
    """Fills the shards of a new or half-written datastore."""

    def __init__(self, folder: str | Path, manifest: Manifest):
        """Create the folder, or continue what is there if it is the same dump."""
        self.folder = Path(folder)
        if (self.folder / MANIFEST).exists():
            present = Manifest.load(self.folder)
            self._check_same_dump(present, manifest)
            self.manifest = present
        else:
            # Whatever else is in the folder is not ours; a mistyped path must not fill somebody's home folder.
            # (Another process may be writing the same manifest this moment.)
            if self.folder.exists() and any(not path.name.startswith(MANIFEST) for path in self.folder.iterdir()):
                raise KnnlmError(f"{self.folder} is not empty and not a datastore; choose another folder")
            self.manifest = manifest
            self.folder.mkdir(parents=True, exist_ok=True)
            missing = sum(self._shard_bytes(shard) for shard in manifest.shards)
            check_disk_space(self.folder, missing, f"the datastore of {manifest.entries:,} entries")
            self.manifest.save(self.folder)

    def _check_same_dump(self, present: Manifest, wanted: Manifest) -> None:
        old, new = present.identity(), wanted.identity()
        different = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        if different:
            changes = ", ".join(f"{name} {old.get(name)} there, {new.get(name)} here" for name in different)
            raise KnnlmError(
                f"{self.folder} holds another dump ({changes}); choose another --knn-dump folder or delete this one"
            )

    def _shard_bytes(self, shard: Shard) -> int:
        row = self.manifest.dim * np.dtype(self.manifest.key_dtype).itemsize
        return shard.rows * (row + np.dtype(self.manifest.value_dtype).itemsize) + 256

    def missing_shards(self) -> list[Shard]:
        missing = [shard for shard in self.manifest.shards if not (self.folder / shard.receipt_name).exists()]
        # Receipts go away once the manifest is complete, so it is read after them: another process may have done it.
        if missing:
            self.manifest = Manifest.load(self.folder)
        return [] if self.manifest.complete else missing

    def check_disk_space_for(self, shards: list[Shard]) -> None:
        needed = sum(self._shard_bytes(shard) for shard in shards)
        check_disk_space(self.folder, needed, f"the rest of the datastore ({len(shards)} shards)")

    def open_shard(self, shard: Shard) -> "ShardWriter":
        return ShardWriter(self.folder, self.manifest, shard)

    def finish(self) -> bool:
        """Mark the datastore complete if every shard is there; True if it is.

        Processes that finish together write the same manifest, so it does not matter who is last.
        """
        if self.missing_shards():
            return False
        if self.manifest.complete:
            return True
        receipts = [self.folder / shard.receipt_name for shard in self.manifest.shards]
        try:
            shards = [Shard(**read_json(receipt)) for receipt in receipts]
        except FileNotFoundError:  # another process completed it this moment
            return self.finish()
        self.manifest.shards, self.manifest.complete = shards, True
        self.manifest.save(self.folder)
        for receipt in receipts:
            receipt.unlink(missing_ok=True)
        return True


class ShardWriter:
    """Appends rows to one shard under a temporary name; ``commit`` moves it into place."""

    def __init__(self, folder: Path, manifest: Manifest, shard: Shard):
        self.folder, self.manifest, self.shard = folder, manifest, shard
        self.rows = 0
        self._files = {}
        self._digests = {}
        for name, shape, dtype in (
            (shard.keys_name, (shard.rows, manifest.dim), manifest.key_dtype),
            (shard.values_name, (shard.rows,), manifest.value_dtype),
        ):
            self._open(name, shape, dtype)

    def _open(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        # Ordinary writes, not a memory map: a full disk is then an error that can be reported instead of a SIGBUS.
        path = self.folder / f"{name}.tmp"
        file = open(path, "ab")  # noqa: SIM115  closed by commit or abort
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed by the kernel when the process is killed
        except OSError as error:
            file.close()
            raise KnnlmError(
                f"another process is writing {path}; wait for it, or give each process its own --shard-id"
            ) from error
        file.truncate(0)  # left by a killed process
        self._files[name] = file
        self._digests[name] = hashlib.sha256()
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(_Tee(file, self._digests[name]), header)

    def append(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Add rows: keys (n, dim) of any float dtype, values (n,)."""
        if self.rows + len(keys) > self.shard.rows:
            raise RuntimeError(f"shard {self.shard.number} has {self.shard.rows} rows, got more")
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(keys, dtype=self.manifest.key_dtype)
        if not np.isfinite(stored).all():
            self.abort()
            if np.isnan(keys).any():
                raise KnnlmError("the model produced NaN keys; check the checkpoint, or run without --fp16")
            raise KnnlmError(
                f"keys overflow {self.manifest.key_dtype} (largest {np.abs(keys).max():.3g}); "
                "dump to a new folder with --knn-key-dtype float32"
            )
        self._write(self.shard.keys_name, stored)
        self._write(self.shard.values_name, np.ascontiguousarray(values, dtype=self.manifest.value_dtype))
        self.rows += len(keys)

    def _write(self, name: str, array: np.ndarray) -> None:
        data = memoryview(array).cast("B")
        self._digests[name].update(data)
        try:
            self._files[name].write(data)
        except OSError as error:
            self.abort()
            raise disk_full(error, self.folder / name) from error

    def commit(self) -> None:
        """Make the shard appear: files first, then the receipt that says they are whole."""
        if self.rows != self.shard.rows:
            raise RuntimeError(f"shard {self.shard.number} has {self.rows} of {self.shard.rows} rows")
        shard = self.shard
        shard.keys_sha256 = self._digests[shard.keys_name].hexdigest()
        shard.values_sha256 = self._digests[shard.values_name].hexdigest()
        try:
            for name, file in self._files.items():
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, self.folder / name)
            write_json(self.folder / shard.receipt_name, asdict(shard))
        except OSError as error:
            self.abort()
            raise disk_full(error, self.folder) from error
        for file in self._files.values():
            file.close()

    def abort(self) -> None:
        """Drop what was written to this shard; finished shards stay."""
        for file in self._files.values():
            Path(file.name).unlink(missing_ok=True)
            try:
                file.close()  # flushes, which on a full disk fails once more
            except OSError:
                continue


class _Tee:
    """Lets numpy write a header to a file and its checksum at once."""

    def __init__(self, file, digest):
        self._file, self._digest = file, digest

    def write(self, data: bytes) -> None:
        self._digest.update(data)
        self._file.write(data)
