"""A random part of a datastore as a datastore of its own, for curves over the datastore's size."""

import io
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import KnnlmError
from ..progress import each
from ..storage import Lock, OutputFile
from .manifest import POSITIONS, Manifest, Shard, plan_shards
from .reader import Datastore
from .writing import DatastoreWriter


def subsample(datastore: Datastore, fraction: float, seed: int, output: str | Path) -> Datastore:
    """Copy a fraction of the entries, drawn without replacement and in corpus order, to a new folder.

    The copy shares no file with the original. Interrupted, the same call resumes.
    """
    if not 0 < fraction <= 1:
        raise KnnlmError(f"--fraction must be above 0 and at most 1, not {fraction:g}")
    if Path(output).resolve() == datastore.folder.resolve():
        raise KnnlmError("-o must be another folder than the datastore itself")
    kept = [(shard, count) for shard in datastore.shards if (count := _count(shard, fraction))]
    if not kept:
        raise KnnlmError(f"{fraction:g} of {len(datastore):,} entries is none; use a larger --fraction")
    entries = [_draw(shard, count, seed) for shard, count in kept]
    return copy_part(datastore, entries, {"fraction": fraction, "seed": seed}, output)


def copy_part(
    datastore: Datastore,
    entries: list[np.ndarray],
    how: dict[str, Any],
    output: str | Path,
    weights: np.ndarray | None = None,
    gather: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Datastore:
    """Copy some entries to a new folder, with the positions that they have in the corpus. The same call resumes.

    Args:
        entries: numbers of the entries of each new shard, ascending through all shards
        how: what the source of the new manifest says about the choice
        weights: of the chosen entries, one after the other; None: those that they have, if any
        gather: the stored keys of some of the chosen entries, (n,) -> (n, dim); None: their own
    """
    chosen = np.concatenate(entries)
    positions = positions_file(chosen if datastore.positions is None else datastore.positions[chosen])
    parent = datastore.manifest.source.get("subsample", {})
    drawn = {
        **how,
        "of_entries": len(datastore),
        "of_corpus": parent.get("of_corpus", parent.get("of_entries", len(datastore))),
        "of_keys": datastore.fingerprint,
        "positions_sha256": sha256(positions).hexdigest(),
    }
    if weights is None and datastore.weights is not None:
        weights = datastore.weights[chosen]
    shards = plan_shards([len(numbers) for numbers in entries])
    manifest = replace(
        datastore.manifest,
        entries=len(chosen),
        source={**datastore.manifest.source, "subsample": drawn},
        shards=shards,
        complete=False,
        keys_in_index=None,
        weighted=weights is not None,
        version=Manifest.version,
    )
    writer = DatastoreWriter(output, manifest, datastore.own_codec)
    missing = {shard.number for shard in writer.missing_shards()}
    for new, numbers in zip(each(shards, "copying", len(shards), " shards"), entries):
        shard = writer.open_shard(new, wait=True) if new.number in missing else None
        if shard is not None:
            own = None if weights is None else weights[new.start : new.stop]
            shard.append_stored((gather or datastore.gather_stored)(numbers), datastore.values[numbers], own)
            shard.commit()
    write_positions(Path(output), positions)
    writer.finish()
    return Datastore(output)


def write_positions(folder: Path, positions: bytes) -> None:
    """Write positions.npy, if nobody has done so yet."""
    with Lock(folder / f"{POSITIONS}.lock", f"writing {folder / POSITIONS}"):
        if not (folder / POSITIONS).exists():
            with OutputFile(folder / POSITIONS) as file:
                file.write(positions)


def _count(shard: Shard, fraction: float) -> int:
    """How many entries of a shard are kept, so that the sum over the shards is the fraction of all."""
    return round(shard.stop * fraction) - round(shard.start * fraction)


def _draw(shard: Shard, count: int, seed: int) -> np.ndarray:
    """Entry numbers, in order. A shard's draw depends on nothing but the seed and the shard."""
    rng = np.random.default_rng([seed, shard.number])
    return np.sort(rng.choice(shard.rows, count, replace=False)) + shard.start


def positions_file(positions: np.ndarray) -> bytes:
    """The bytes of positions.npy: where the entries stood in the corpus."""
    file = io.BytesIO()
    np.save(file, positions.astype(np.int64))
    return file.getvalue()
