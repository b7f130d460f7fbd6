"""``--knn-dry-run``: what a dump would write and how long it would take, with nothing written."""

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ..datastore.dump_plan import plan_blocks, sample_blocks
from ..datastore.key_codec import KeyForm
from ..datastore.manifest import MANIFEST, Manifest, value_dtype_for
from ..errors import KnnlmError
from ..index.plan import estimate_time, plan_index
from ..memory.presets import flag
from ..progress import human_seconds
from ..storage import check_disk_space, human_bytes
from .dumping import EntryMaker
from .eval_lm import end_with

logger = logging.getLogger(__name__)

TIMED_ROWS = 8192  # of the text, that tell how fast the model is


def describe_dump(
    args: Any,
    rows: np.ndarray,
    own_part: Callable[[int], tuple[int, int]],
    form: KeyForm,
    vocabulary_size: int,
    entries: EntryMaker,
    groups_of: Callable[[list], Iterable[dict]],
) -> None:
    """Say how much a dump would write, how long that would take, and which index would be built.

    Args:
        rows: entries of each block of the corpus
        own_part: from the number of shards to the first and the last (exclusive) that this process would do
        entries: makes keys of the batches that ``groups_of(ranges of blocks)`` gives
    """
    own = _describe_shards(Path(args.knn_dump), rows, own_part, form, vocabulary_size)
    if own:
        _describe_time(entries, groups_of, rows, own)
    _describe_index(flag(args, "knn_index"), int(rows.sum()), form, str(args.knn_metric))
    end_with("nothing was written; leave out --knn-dry-run to dump", with_loss=False)


def _describe_shards(
    folder: Path, rows: np.ndarray, own_part: Callable[[int], tuple[int, int]], form: KeyForm, vocabulary_size: int
) -> int:
    """How many entries this process would write."""
    ranges = plan_blocks(rows)
    done = _finished_shards(folder, len(ranges))
    missing = [number for number in range(*own_part(len(ranges))) if number not in done]
    own = sum(int(rows[start:stop].sum()) for start, stop in (ranges[number] for number in missing))
    value_bytes = np.dtype(value_dtype_for(vocabulary_size)).itemsize
    entry_bytes = form.dim * np.dtype(form.dtype).itemsize + value_bytes
    logger.info(
        f"dry run: would dump {own:,} of {int(rows.sum()):,} entries to {folder}: {len(missing)} of {len(ranges)} "
        f"shards, {human_bytes(own * entry_bytes)} ({entry_bytes:,} bytes per entry, keys of {form.dim} x {form.dtype})"
    )
    check_disk_space(_existing(folder), own * entry_bytes, f"the datastore of {own:,} entries")
    return own


def _describe_time(
    entries: EntryMaker, groups_of: Callable[[list], Iterable[dict]], rows: np.ndarray, own: int
) -> None:
    """Run the model on a little of the text, and say how long all of it would take."""
    groups = list(groups_of(sample_blocks(rows, TIMED_ROWS, pieces=4)))
    entries.make(groups[0])  # the first time is slow
    started = time.perf_counter()
    timed = sum(len(values) for group in groups for _, values in entries.make(group))
    per_second = timed / (time.perf_counter() - started)
    logger.info(
        f"dry run: about {human_seconds(own / per_second)} at {per_second:,.0f} tokens/s, as timed on {timed:,} tokens"
    )


def _describe_index(spec: str | None, entries: int, form: KeyForm, metric: str) -> None:
    """Say which index would be built, and what that takes."""
    if spec is None:
        logger.info("dry run: no index (add --knn-index auto to build one)")
        return
    plan = plan_index(spec, entries, form.dim, form.dtype, metric)
    if plan.factory is None:
        logger.info(f"dry run: index {spec}: {plan.why}")
        return
    logger.info(
        f"dry run: index {spec}: {plan.factory} ({plan.why}), {human_bytes(plan.bytes)}; building it needs about "
        f"{human_bytes(plan.memory_bytes)} of memory, {human_bytes(plan.disk_bytes)} of disk and "
        f"{estimate_time(plan, entries, form.dim)}"
    )


def _finished_shards(folder: Path, count: int) -> set[int]:
    """The shards that an interrupted dump has left, or all of a finished one."""
    if not folder.exists():
        return set()
    if not (folder / MANIFEST).exists():
        if not folder.is_dir() or any(folder.iterdir()):
            raise KnnlmError(f"{folder} is not empty and not a datastore; choose another folder")
        return set()
    manifest = Manifest.load(folder)
    if manifest.complete:
        return set(range(count))
    return {shard.number for shard in manifest.shards if (folder / shard.receipt_name).exists()}


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
