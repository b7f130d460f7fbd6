"""Writing a datastore, shard by shard, by one or several processes."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ..errors import KnnlmError
from ..storage import (
    Lock,
    OutputFile,
    check_disk_space,
    from_record,
    make_folder,
    read_json,
    remove_stale_files,
    write_json,
)
from .key_codec import PROJECTION, QUANTIZER, KeyCodec, LearntCodec
from .manifest import MANIFEST, WEIGHT_DTYPE, Manifest, Shard

MakeCodec = Callable[[], LearntCodec]


class DatastoreWriter:
    """Fills the shards of a new or half-written datastore."""

    def __init__(self, folder: str | Path, manifest: Manifest, make_codec: MakeCodec | None = None):
        """Create the folder, or continue what is there if it is the same dump.

        Args:
            make_codec: how keys are made compact. Called by the first process alone, which stores the codec before
                anything else; the others wait for it
        """
        self.folder = Path(folder)
        make_folder(self.folder)
        if not (self.folder / MANIFEST).exists():
            self._refuse_foreign_files()
        with self._manifest_lock():
            if (self.folder / MANIFEST).exists():
                present = Manifest.load(self.folder)
                self._check_same_dump(present, manifest)
                self.manifest = present
            else:
                self._refuse_foreign_files()
                self.manifest = manifest
                missing = sum(self._shard_bytes(shard) for shard in manifest.shards)
                check_disk_space(self.folder, missing, f"the datastore of {manifest.entries:,} entries")
                if make_codec is not None:
                    codec, manifest.projection, manifest.quantizer = make_codec()
                    codec.save(self.folder, manifest)
                self.manifest.save(self.folder)
            remove_stale_files(self.folder)
        self.codec = KeyCodec.load(self.folder, self.manifest)

    def _manifest_lock(self) -> Lock:
        return Lock(self.folder / f"{MANIFEST}.lock", f"writing {self.folder / MANIFEST}")

    def _refuse_foreign_files(self) -> None:
        """Whatever else is in the folder is not ours: a mistyped path must not fill somebody's home folder."""
        # Another process may be writing the same manifest this moment, under a temporary name, or what comes before it.
        first = (MANIFEST, PROJECTION, QUANTIZER)
        if any(not path.name.startswith(first) for path in self.folder.iterdir()):
            raise KnnlmError(f"{self.folder} is not empty and not a datastore; choose another folder")

    def _check_same_dump(self, present: Manifest, wanted: Manifest) -> None:
        old, new = present.identity(), wanted.identity()
        different = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        if different:
            changes = ", ".join(f"{name} {old.get(name)} there, {new.get(name)} here" for name in different)
            raise KnnlmError(
                f"{self.folder} holds another dump ({changes}); choose another folder or delete this one"
            )

    def _shard_bytes(self, shard: Shard) -> int:
        return shard.rows * self.manifest.entry_bytes + 256

    def missing_shards(self) -> list[Shard]:
        missing = [shard for shard in self.manifest.shards if not (self.folder / shard.receipt_name).exists()]
        # Receipts go away once the manifest is complete, so it is read after them: another process may have done it.
        if missing:
            self.manifest = Manifest.load(self.folder)
        return [] if self.manifest.complete else missing

    def check_disk_space_for(self, shards: list[Shard]) -> None:
        needed = sum(self._shard_bytes(shard) for shard in shards)
        check_disk_space(self.folder, needed, f"the rest of the datastore ({len(shards)} shards)")

    def open_shard(self, shard: Shard, wait: bool = False) -> "ShardWriter | None":
        """Begin a shard. If another process writes it, fail, or wait for it; None if it has written the shard."""
        lock = Lock(
            self.folder / shard.lock_name, f"writing shard {shard.number} of {self.folder}", wait=wait,
            instead="give each process its own --shard-id",
        )  # fmt: skip
        lock.acquire()
        if shard.number not in {missing.number for missing in self.missing_shards()}:
            lock.release()
            return None
        return ShardWriter(self.folder, self.manifest, self.codec, shard, lock)

    def finish(self) -> bool:
        """Mark the datastore complete if every shard is there; True if it is."""
        with self._manifest_lock():  # processes may finish together
            if self.missing_shards():
                return False
            receipts = [self.folder / shard.receipt_name for shard in self.manifest.shards]
            if not self.manifest.complete:
                remedy = "delete it and run the same command again"
                self.manifest.shards = [from_record(Shard, read_json(path, remedy), path, remedy) for path in receipts]
                self.manifest.complete = True
                self.manifest.save(self.folder)
            for receipt in receipts:
                receipt.unlink(missing_ok=True)
            return True


class ShardWriter:
    """Appends rows to one shard under a temporary name; ``commit`` moves it into place."""

    def __init__(self, folder: Path, manifest: Manifest, codec: KeyCodec, shard: Shard, lock: Lock):
        self.folder, self.manifest, self.shard = folder, manifest, shard
        self._codec, self._lock = codec, lock
        self.rows = 0
        self._files: list[OutputFile] = []
        try:
            self._keys = self._open(shard.keys_name, (shard.rows, manifest.dim), manifest.key_dtype)
            self._values = self._open(shard.values_name, (shard.rows,), manifest.value_dtype)
            self._weights: OutputFile | None = None
            if manifest.weighted:
                self._weights = self._open(shard.weights_name, (shard.rows,), WEIGHT_DTYPE)
        except BaseException:
            self.abort()
            raise

    def _open(self, name: str, shape: tuple[int, ...], dtype: str) -> OutputFile:
        file = OutputFile(self.folder / name)
        self._files.append(file)
        file.write_array_header(shape, dtype)
        return file

    def append(self, states: np.ndarray, values: np.ndarray, weights: np.ndarray | None = None) -> None:
        """Add rows: states (n, source dim) of any float dtype, which become keys; values (n,); weights (n,)."""
        stored = self._codec.encode(states)
        rounded = stored.dtype == np.int8  # which hides what is not a number
        if not np.isfinite(states if rounded else stored).all():
            self.abort()
            if rounded or np.isnan(states).any():
                raise KnnlmError("the model produced NaN or infinite keys; check the checkpoint, or run without --fp16")
            raise KnnlmError(
                f"keys overflow {self.manifest.key_dtype} (largest {np.abs(states).max():.3g}); "
                "dump to a new folder with --knn-key-dtype float32"
            )
        self.append_stored(stored, values, weights)

    def append_stored(self, keys: np.ndarray, values: np.ndarray, weights: np.ndarray | None = None) -> None:
        """Add rows: keys (n, dim) as they are stored, values (n,), and weights (n,) where there are any."""
        if (weights is not None) != self.manifest.weighted:
            raise RuntimeError(f"the manifest says weighted: {self.manifest.weighted}, the rows do not")
        if self.rows + len(keys) > self.shard.rows:
            raise RuntimeError(f"shard {self.shard.number} has {self.shard.rows} rows, got more")
        try:
            self._keys.write(np.ascontiguousarray(keys, dtype=self.manifest.key_dtype))
            self._values.write(np.ascontiguousarray(values, dtype=self.manifest.value_dtype))
            if self._weights is not None:
                self._weights.write(np.ascontiguousarray(weights, dtype=WEIGHT_DTYPE))
        except KnnlmError:
            self.abort()
            raise
        self.rows += len(keys)

    def commit(self) -> None:
        """Make the shard appear: files first, then the receipt that says they are whole."""
        if self.rows != self.shard.rows:
            raise RuntimeError(f"shard {self.shard.number} has {self.rows} of {self.shard.rows} rows")
        try:
            self.shard.keys_sha256, self.shard.values_sha256 = self._keys.commit(), self._values.commit()
            if self._weights is not None:
                self.shard.weights_sha256 = self._weights.commit()
            write_json(self.folder / self.shard.receipt_name, asdict(self.shard))
        except KnnlmError:
            self.abort()
            raise
        self._lock.release()

    def abort(self) -> None:
        """Drop what was written to this shard; finished shards stay."""
        for file in self._files:
            file.abort()
        self._lock.release()
