"""Adopt a datastore of the original implementation: raw memory maps without a header, and a FAISS index.

The original writes ``<prefix>_keys.npy`` (float16 or float32) and ``<prefix>_vals.npy`` (int16 or int64), and its user
has to remember the sizes. Here they are deduced, and everything is checked before anybody scores with it.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..datastore.manifest import MANIFEST, Manifest, Shard, plan_shards, value_dtype_for
from ..datastore.reader import Datastore
from ..datastore.writing import DatastoreWriter, ShardWriter
from ..errors import KnnlmError
from ..progress import each
from ..storage import remove_own_files
from .adopted_index import FoundIndex, adopt_index, find_index_files
from .raw_files import DamagedStoreError, RawFile, check_keys, fingerprint, zero_row
from .raw_layout import Known, RawLayout, deduce_layout, unsigned
from .raw_weights import RawWeights, open_weights

logger = logging.getLogger(__name__)

SHARD_ROWS = 1 << 18
ROWS_PER_WRITE = 1 << 14
LONE_ZEROS = 8  # token 0 is <s>, of which at most a few stand at the end of a corpus


class ModelFacts(NamedTuple):
    """What the checkpoint says about the keys that it made."""

    dim: int
    layer: int
    checkpoint_sha256: str


@dataclass(frozen=True)
class Imported:
    """A finished import."""

    datastore: Datastore
    copied: bool  # False: the entries were there already
    index: str | None  # what became of the index: adopted, or there already; None: none was given


def import_datastore(
    prefix: str,
    folder: str,
    dictionary: dict[str, Any],
    key: str,
    layer: int,
    dim: int | None = None,
    entries: int | None = None,
    key_dtype: str | None = None,
    index_path: str | None = None,
    model: ModelFacts | None = None,
) -> Imported:
    """Copy raw memory maps into a datastore folder, and the index if there is one; the originals stay as they are.

    Interrupted, the same call resumes.

    Args:
        dictionary: dictionary_sha256 and dictionary_size
        entries: import so many only, from the first
        model: of the checkpoint that made the keys, which makes ``layer`` certain; None: it stays as it is
    """
    for flag, number in (("--dim", dim), ("--size", entries)):
        if number is not None and number < 1:
            raise KnnlmError(f"{flag} must be 1 or more, not {number}")
    keys, values = RawFile(Path(f"{prefix}_keys.npy")), RawFile(Path(f"{prefix}_vals.npy"))
    found = find_index_files(Path(index_path)) if index_path else None
    claims = {
        "--dim": dim,
        "the index": found.index.d if found else None,
        "the checkpoint": model.dim if model else None,
    }
    known = Known(
        dims={who: claim for who, claim in claims.items() if claim is not None},
        key_dtype=key_dtype, entries=entries, index_entries=found.index.ntotal if found else None,
    )  # fmt: skip
    layout, why = deduce_layout(keys, values, known, dictionary["dictionary_size"])
    logger.info(
        f"{layout.entries:,} entries, keys of {layout.dim} {layout.key_dtype}, values of {layout.value_dtype} ({why})"
    )
    _check_zeros_at_the_end(keys, values, layout)
    _check_index_size(found, layout)
    weights = open_weights(Path(f"{prefix}_weights.npy"), layout, values)
    files = (keys, values) if weights is None else (keys, values, weights.file)
    source = {"imported_from": keys.path.name, "raw_files_sha256": fingerprint(*files), **dictionary}
    if model is not None:
        layer, source["checkpoint_sha256"] = model.layer, model.checkpoint_sha256
    else:
        logger.info("nothing tells which model made these keys; --path CHECKPOINT would let it be checked")
    manifest = _manifest(layout, key, layer, source, weights is not None)
    copied = _copy_entries(keys, values, weights, layout, Path(folder), manifest)
    datastore = Datastore(folder)
    return Imported(datastore, copied, adopt_index(datastore, found) if found else None)


def _manifest(layout: RawLayout, key: str, layer: int, source: dict[str, Any], weighted: bool) -> Manifest:
    return Manifest(
        entries=layout.entries,
        dim=layout.dim,
        key_dtype=layout.key_dtype,
        value_dtype=value_dtype_for(source["dictionary_size"]),
        key=key,
        layer=layer,
        source=source,
        shards=plan_shards([min(SHARD_ROWS, layout.entries - row) for row in range(0, layout.entries, SHARD_ROWS)]),
        weighted=weighted,
    )


# --- checks before anything is written ------------------------------------------------------------------------------


def _check_zeros_at_the_end(keys: RawFile, values: RawFile, layout: RawLayout) -> None:
    """Refuse what a dump that ended early has left, and say how much of it can be used."""
    row_bytes = layout.dim * np.dtype(layout.key_dtype).itemsize
    used = -(-keys.used_bytes() // row_bytes)
    if used < layout.entries:
        if keys.is_used_after(used * row_bytes):
            raise zero_row(keys.path, used)
        raise KnnlmError(
            f"the last {layout.entries - used:,} rows of {keys.path} are zero, because the dump ended early or was "
            f"given too large a size; use --size {used} to import the others"
        )
    used_values = -(-values.used_bytes() // np.dtype(layout.value_dtype).itemsize)
    if used_values < layout.entries - LONE_ZEROS:
        raise KnnlmError(
            f"{values.path} holds nothing but zeros from entry {used_values:,} on, although there are keys; restore "
            f"it, or use --size {used_values} to import the entries before"
        )


def _check_index_size(found: FoundIndex | None, layout: RawLayout) -> None:
    if found is not None and found.index.ntotal != layout.entries:
        fewer = f"use --size {found.index.ntotal}, or " if found.index.ntotal < layout.entries else ""
        raise KnnlmError(
            f"{found.path} holds {found.index.ntotal:,} keys, not {layout.entries:,}; {fewer}leave --index out and run "
            "knnlm build"
        )


# --- copying --------------------------------------------------------------------------------------------------------


def _copy_entries(
    keys: RawFile, values: RawFile, weights: RawWeights | None, layout: RawLayout, folder: Path, manifest: Manifest
) -> bool:
    """Fill the shards that are missing; whether any was. Other processes may fill some of them at the same time."""
    writer = DatastoreWriter(folder, manifest)
    missing = writer.missing_shards()
    writer.check_disk_space_for(missing)
    try:
        for shard in each(missing, "copying", len(missing), " shards"):
            output = writer.open_shard(shard, wait=True)
            if output is not None:
                _copy_shard(keys, values, weights, layout, shard, output, manifest.source["dictionary_size"])
    except DamagedStoreError:
        _remove_half_made(writer)
        raise
    writer.finish()
    return bool(missing)


def _copy_shard(
    keys: RawFile,
    values: RawFile,
    weights: RawWeights | None,
    layout: RawLayout,
    shard: Shard,
    output: ShardWriter,
    vocabulary_size: int,
) -> None:
    try:
        for start in range(shard.start, shard.stop, ROWS_PER_WRITE):
            stop = min(start + ROWS_PER_WRITE, shard.stop)
            block = keys.rows(layout.key_dtype, layout.dim, start, stop)
            tokens = unsigned(values.rows(layout.value_dtype, 1, start, stop)[:, 0])
            check_keys(keys.path, block, start)
            if tokens.min() < 0 or tokens.max() >= vocabulary_size:
                raise DamagedStoreError(
                    f"{values.path} holds tokens outside the dictionary; give the dict.txt it was made with"
                )
            output.append(block, tokens, None if weights is None else weights.rows(start, stop))
        output.commit()
    except BaseException:
        output.abort()
        raise


def _remove_half_made(writer: DatastoreWriter) -> None:
    """Remove an import that can never be finished."""
    ours = {MANIFEST, f"{MANIFEST}.lock"}
    for shard in writer.manifest.shards:
        ours |= {shard.keys_name, shard.values_name, shard.weights_name, shard.receipt_name, shard.lock_name}
    remove_own_files(writer.folder, ours.__contains__)
