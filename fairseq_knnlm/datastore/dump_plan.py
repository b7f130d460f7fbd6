"""What a dump has to write: the shards of the corpus, and which of them one process still has to do."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..storage import human_bytes
from .manifest import Manifest, Shard, plan_shards, value_dtype_for
from .writing import DatastoreWriter, MakeCodec

logger = logging.getLogger(__name__)

# A killed dump repeats at most one shard, and a shard is the least that a process can take on.
MAX_SHARD_ROWS = 1 << 18
MIN_SHARDS = 16


def plan_blocks(block_rows: np.ndarray) -> list[tuple[int, int]]:
    """Cut the corpus into shards of whole blocks: (start, stop) block numbers of each shard.

    Depends on the corpus alone, so every process and every batch size comes to the same plan.
    """
    ends = np.cumsum(block_rows, dtype=np.int64)
    rows_wanted = min(MAX_SHARD_ROWS, -(-int(ends[-1]) // MIN_SHARDS))
    ranges, start = [], 0
    while start < len(ends):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + rows_wanted, side="right")))
        ranges.append((start, stop))
        start = stop
    return ranges


def sample_blocks(block_rows: np.ndarray, rows: int, pieces: int = 64) -> list[tuple[int, int]]:
    """Blocks that hold about so many rows, in pieces spread evenly over the corpus: (start, stop) of each piece."""
    ends = np.cumsum(block_rows, dtype=np.int64)
    total = int(ends[-1])
    if total <= rows:
        return [(0, len(block_rows))]
    ranges, last = [], 0
    for piece in range(pieces):
        begin = total * piece // pieces
        start = max(last, int(np.searchsorted(ends, begin, side="right")))
        stop = min(len(ends), int(np.searchsorted(ends, begin + rows // pieces)) + 1)
        if start < stop:
            ranges.append((start, stop))
            last = stop
    return ranges


class DumpPlan:
    """What one process has to dump: the missing shards of its contiguous part, as ranges of blocks."""

    def __init__(
        self, folder: str, facts: dict, block_rows: np.ndarray, part: Callable[[int], tuple[int, int]],
        make_codec: MakeCodec | None = None,
    ):  # fmt: skip
        """
        Args:
            facts: the fields of the manifest that the task knows (dim, key_dtype, key, layer, source, vocabulary)
            block_rows: how many entries each block gives
            part: from the number of shards to the first and the last (exclusive) that this process does
            make_codec: how keys are made compact; called if nobody has done so yet
        """
        facts = dict(facts)
        ranges = plan_blocks(block_rows)
        rows = [int(block_rows[start:stop].sum()) for start, stop in ranges]
        manifest = Manifest(
            entries=sum(rows),
            value_dtype=value_dtype_for(facts.pop("vocabulary_size")),
            shards=plan_shards(rows),
            **facts,
        )
        self.writer = DatastoreWriter(folder, manifest, make_codec)
        first, last = part(len(ranges))
        self.shards: list[Shard] = [s for s in self.writer.missing_shards() if first <= s.number < last]
        self.block_ranges = [ranges[shard.number] for shard in self.shards]
        self.writer.check_disk_space_for(self.shards)

    @property
    def folder(self) -> Path:
        return self.writer.folder

    def announce(self) -> None:
        """Say what will be done, and how much disk it takes, before it starts."""
        manifest = self.writer.manifest
        if manifest.complete:
            logger.info(f"{self.folder} is complete already: {manifest.entries:,} entries, nothing to dump")
            return
        rows = sum(shard.rows for shard in self.shards)
        size = rows * manifest.entry_bytes
        logger.info(
            f"dumping {rows:,} of {manifest.entries:,} entries to {self.folder}: {len(self.shards)} of "
            f"{len(manifest.shards)} shards, {human_bytes(size)}"
        )
