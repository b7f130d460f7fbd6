"""A random part of a datastore as a datastore of its own, for curves over the datastore's size."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from .datastore import POSITIONS, Datastore, DatastoreWriter, Shard, plan_shards
from .errors import KnnlmError
from .files import disk_full

logger = logging.getLogger(__name__)


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
    drawn = {"fraction": fraction, "seed": seed, "of_entries": len(datastore), "of_keys": datastore.fingerprint}
    shards = plan_shards([count for _, count in kept])
    manifest = replace(
        datastore.manifest,
        entries=sum(shard.rows for shard in shards),
        source={**datastore.manifest.source, "subsample": drawn},
        shards=shards,
        complete=False,
    )
    writer = DatastoreWriter(output, manifest)
    missing = {shard.number for shard in writer.missing_shards()}
    positions = [_draw(shard, count, seed) for shard, count in kept]
    for new, chosen in zip(tqdm(shards, unit="shard", desc="copying", leave=False), positions):
        if new.number in missing:
            shard = writer.open_shard(new)
            shard.append(datastore.gather_keys(chosen), datastore.values[chosen])
            shard.commit()
    _write_positions(Path(output), np.concatenate(positions))
    writer.finish()
    return Datastore(output)


def _count(shard: Shard, fraction: float) -> int:
    """How many entries of a shard are kept, so that the sum over the shards is the fraction of all."""
    return round(shard.stop * fraction) - round(shard.start * fraction)


def _draw(shard: Shard, count: int, seed: int) -> np.ndarray:
    """Entry numbers, in order. A shard's draw depends on nothing but the seed and the shard."""
    rng = np.random.default_rng([seed, shard.number])
    return np.sort(rng.choice(shard.rows, count, replace=False)) + shard.start


def _write_positions(folder: Path, positions: np.ndarray) -> None:
    temporary = folder / f"{POSITIONS}.tmp"
    try:
        with open(temporary, "wb") as file:
            np.save(file, positions)
        os.replace(temporary, folder / POSITIONS)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_full(error, folder / POSITIONS) from error
