"""One forward pass over a split writes its keys and values to a datastore, resumably."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from fairseq.sequence_scorer import SequenceScorer
from torch import nn

from .blocks import contiguous_part, own_positions
from .datastore import DatastoreWriter, Manifest, Shard, ShardWriter, plan_shards, value_dtype_for
from .files import human_bytes
from .keys import KeyExtractor
from .threads import for_each_batch

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


class DumpPlan:
    """What one process has to dump: the missing shards of its contiguous part, as ranges of blocks."""

    def __init__(self, folder: str, facts: dict, block_rows: np.ndarray, num_parts: int, part: int):
        """
        Args:
            facts: the fields of the manifest that the task knows (dim, key_dtype, key, layer, source, vocabulary)
            block_rows: how many entries each block gives
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
        self.writer = DatastoreWriter(folder, manifest)
        first, last = contiguous_part(len(ranges), num_parts, part)
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
        size = rows * (manifest.dim * np.dtype(manifest.key_dtype).itemsize + np.dtype(manifest.value_dtype).itemsize)
        logger.info(
            f"dumping {rows:,} of {manifest.entries:,} entries to {self.folder}: {len(self.shards)} of "
            f"{len(manifest.shards)} shards, {human_bytes(size)}"
        )


class KeyDumper(SequenceScorer):
    """Stands where fairseq expects a scorer and writes keys instead of computing scores."""

    def __init__(
        self, tgt_dict, plan: DumpPlan, extractor: KeyExtractor, skip: int, when_complete: Callable[[], None]
    ):
        super().__init__(tgt_dict)
        self.plan, self.extractor, self.skip, self.when_complete = plan, extractor, skip, when_complete
        self._pending = list(plan.shards)
        self._open: ShardWriter | None = None

    @torch.no_grad()
    def generate(self, models: list[nn.Module], sample: dict, **kwargs) -> list:
        (model,) = models
        model.eval()
        for batch in sample["warm_up"]:  # a model with a memory has to know what came before
            model(**batch["net_input"], features_only=True)
        batches = sample["batches"]
        for keys, values in for_each_batch(model, lambda batch: self._entries(model, batch), batches):
            self._append(keys, values)
        # There is no loss; NaN says so where 0 would pass for one.
        rows = (row[mask] for batch in batches for row, mask in zip(batch["target"], own_positions(batch)))
        return [[{"tokens": row, "positional_scores": row * float("nan")}] for row in rows]

    def _entries(self, model: nn.Module, batch: dict) -> tuple[np.ndarray, np.ndarray]:
        """Keys (n, C) and values (n,) of a batch, in corpus order."""
        own = own_positions(batch, self.skip)
        keys = self.extractor.run(model, batch["net_input"])[own]
        return keys.float().cpu().numpy(), batch["target"][own].cpu().numpy()

    def _append(self, keys: np.ndarray, values: np.ndarray) -> None:
        if self._open is None:
            self._open = self.plan.writer.open_shard(self._pending.pop(0))
        self._open.append(keys, values)
        if self._open.rows == self._open.shard.rows:  # batches never span shards
            self._open.commit()
            self._open = None
            if not self._pending:
                self._finish()

    def _finish(self) -> None:
        if self.plan.writer.finish():
            logger.info(f"{self.plan.folder} is complete: {self.plan.writer.manifest.entries:,} entries")
            self.when_complete()
        else:
            missing = len(self.plan.writer.missing_shards())
            logger.info(f"this part is done; {missing} shards of other parts are still missing in {self.plan.folder}")
