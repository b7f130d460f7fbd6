"""A datastore with the same entries and smaller keys: fewer dimensions, 8 bits."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..errors import KnnlmError
from ..progress import progress
from .key_codec import SAMPLE_ROWS, KeyForm, LearntCodec, check_dim, learn_codec
from .manifest import KEY_DTYPES, plan_shards
from .reader import Datastore
from .subsample import positions_file, write_positions
from .writing import DatastoreWriter

logger = logging.getLogger(__name__)

ROWS_PER_WRITE = 1 << 15


def compact(datastore: Datastore, dim: int | None, dtype: str | None, output: str | Path) -> Datastore:
    """Copy a datastore to a new folder with keys of ``dim`` dimensions (None: all) in ``dtype`` (None: its own).

    Interrupted, the same call resumes.
    """
    manifest = datastore.manifest
    dim, dtype = dim or datastore.dim, dtype or manifest.key_dtype
    if Path(output).resolve() == datastore.folder.resolve():
        raise KnnlmError("-o must be another folder than the datastore itself")
    if dtype not in KEY_DTYPES:
        raise KnnlmError(f"--dtype must be one of {', '.join(KEY_DTYPES)}, not {dtype}")
    check_dim(dim, datastore.dim, "--dim")
    if manifest.projection is not None or manifest.quantizer is not None:
        raise KnnlmError(
            f"the keys of {datastore.folder} are compact already ({describe_keys(datastore)}); compact the datastore "
            "that they were made from, or dump again"
        )
    form = KeyForm(datastore.dim, dim, dtype)
    new = replace(
        manifest,
        **form.facts(),
        shards=plan_shards([shard.rows for shard in datastore.shards]),
        complete=False,
        keys_in_index=None,
        version=type(manifest).version,
    )

    def make_codec() -> LearntCodec:
        rows = np.linspace(0, len(datastore) - 1, min(len(datastore), SAMPLE_ROWS)).astype(np.int64)
        return learn_codec(datastore.gather_keys(rows).astype(np.float32), form)

    writer = DatastoreWriter(output, new, make_codec if form.is_compact else None)
    missing = {shard.number for shard in writer.missing_shards()}
    with progress("compacting", len(datastore), " keys") as bar:
        for shard in new.shards:
            part = writer.open_shard(shard, wait=True) if shard.number in missing else None
            if part is not None:
                for first in range(shard.start, shard.stop, ROWS_PER_WRITE):
                    stop = min(first + ROWS_PER_WRITE, shard.stop)
                    values, weights = datastore.read_values(first, stop), datastore.read_weights(first, stop)
                    part.append(datastore.read_keys(first, stop), values, weights)
                    bar.update(stop - first)
                part.commit()
    _copy_positions(datastore, Path(output))
    writer.finish()
    return Datastore(output)


def _copy_positions(datastore: Datastore, output: Path) -> None:
    """A subsample's copy has its positions, too."""
    if datastore.positions is not None:
        write_positions(output, positions_file(np.asarray(datastore.positions)))


def describe_keys(datastore: Datastore) -> str:
    """What the keys are and what that costs, for people to read."""
    manifest = datastore.manifest
    text = f"{manifest.dim} x {manifest.key_dtype}"
    if manifest.keys_in_index is not None:
        text += f", only in the index {manifest.keys_in_index}"
    if manifest.projection is not None:
        kept = manifest.projection
        text += f", of {kept.source_dim} dimensions, with {kept.variance_kept:.1%} of the variance"
    if manifest.quantizer is not None:
        text += f", rounded to 8 bits ({manifest.quantizer.error:.2%} of the variance lost, "
        text += f"{manifest.quantizer.clipped:.2%} of the numbers cut off)"
    return text
