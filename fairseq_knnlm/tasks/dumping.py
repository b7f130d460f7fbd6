"""A dump in the place where fairseq expects an evaluation: batches go in, shards of a datastore come out."""

import logging
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from ..data.context_blocks import own_positions
from ..datastore import Shard, ShardWriter
from ..datastore.dump_plan import DumpPlan
from ..keys import KeyExtractor, Model
from ..keys.running import for_each_batch
from .eval_lm import GroupedBatches, say_that_a_dump_has_no_loss

logger = logging.getLogger(__name__)


class KeyDumper:
    """Writes the keys and values of batches, which come in corpus order, to the shards of a plan."""

    def __init__(self, model: Model, plan: DumpPlan, extractor: KeyExtractor, skip: int):
        """skip: positions at each row's start that are not of the corpus (the <s> of ``--add-bos-token``)."""
        self._model, self._plan, self._extractor, self._skip = model, plan, extractor, skip
        model.eval()
        self._pending = list(plan.shards)
        self._shard: Shard | None = None  # that the next rows belong to
        self._rows = 0  # of it that have come
        self._open: ShardWriter | None = None  # None: another process has written this shard meanwhile

    @torch.no_grad()
    def dump(self, batches: list[dict], warm_up: list[dict]) -> None:
        """warm_up: what a model with a memory has to read before the batches."""
        for batch in warm_up:
            self._model(**batch["net_input"], features_only=True)
        for keys, values in for_each_batch(self._model, self._entries, batches):
            self._append(keys, values)

    def _entries(self, batch: dict) -> tuple[np.ndarray, np.ndarray]:
        """Keys (n, C) and values (n,) of a batch, in corpus order."""
        own = own_positions(batch, self._skip)
        keys = self._extractor.run(self._model, batch["net_input"])[own]
        return keys.float().cpu().numpy(), batch["target"][own].cpu().numpy()

    def _append(self, keys: np.ndarray, values: np.ndarray) -> None:
        if self._shard is None:
            self._shard, self._rows = self._pending.pop(0), 0
            self._open = self._plan.writer.open_shard(self._shard)
        if self._open is not None:
            self._open.append(keys, values)
        self._rows += len(keys)
        if self._rows == self._shard.rows:  # batches never span shards
            if self._open is not None:
                self._open.commit()
            self._shard = None


class DumpBatches:
    """What eval_lm iterates over during a dump: each step writes some batches, and gives fairseq nothing to score."""

    def __init__(
        self,
        groups: GroupedBatches | None,
        dumper: KeyDumper | None,
        plan: DumpPlan,
        when_complete: Callable[[], None],
    ):
        """
        Args:
            groups, dumper: None where every shard of this process is written already
            when_complete: called if the datastore is finished then
        """
        self._groups, self._dumper, self._plan, self._when_complete = groups, dumper, plan, when_complete

    def __len__(self) -> int:
        return len(self._groups) if self._groups is not None else 0

    def __iter__(self) -> Iterator[dict]:
        started = time.perf_counter()
        if self._groups is not None and self._dumper is not None:
            for group in self._groups:
                self._dumper.dump(group["batches"], group["warm_up"])
                yield {}  # one step of fairseq's progress bar; a sample without net_input is passed over
            rows, seconds = sum(shard.rows for shard in self._plan.shards), time.perf_counter() - started
            logger.info(f"dumped {rows:,} entries in {seconds:.1f}s ({rows / seconds:.2f} tokens/s)")
        self._finish()

    def _finish(self) -> None:
        writer, folder = self._plan.writer, self._plan.folder
        if writer.finish():
            logger.info(f"{folder} is complete: {writer.manifest.entries:,} entries")
            self._when_complete()
        else:
            missing = len(writer.missing_shards())
            logger.info(f"this part is done; {missing} shards of other parts are still missing in {folder}")
        say_that_a_dump_has_no_loss()
