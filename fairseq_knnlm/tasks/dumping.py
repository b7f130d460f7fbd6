"""A dump in the place where fairseq expects an evaluation: batches go in, shards of a datastore come out."""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..data.context_blocks import own_positions
from ..data.lane_reading import corpus_order, in_lanes, rows_in_order
from ..datastore import Datastore, Shard, ShardWriter
from ..datastore.dump_plan import DumpPlan
from ..datastore.key_codec import KeyForm, LearntCodec, check_dim, learn_codec
from ..errors import resumable
from ..index import describe_index, list_indexes
from ..keys import KeyExtractor, Model, key_dimension
from ..keys.running import for_each_batch
from ..progress import progress
from .eval_lm import Groups, end_with, show_own_progress
from .summaries import dump_summary

logger = logging.getLogger(__name__)


def key_form(model: Model, args: Any) -> KeyForm:
    """What ``--knn-key-dim`` and ``--knn-key-dtype`` ask for."""
    source_dim = key_dimension(model)
    dim = source_dim if args.knn_key_dim is None else args.knn_key_dim
    check_dim(dim, source_dim)
    return KeyForm(source_dim, dim, str(args.knn_key_dtype))


class EntryMaker:
    """Runs the model on batches to get their keys and values."""

    def __init__(self, model: Model, extractor: KeyExtractor, skip: int):
        """skip: positions at each row's start that are not of the corpus (the <s> of ``--add-bos-token``)."""
        self._model, self._extractor, self._skip = model, extractor, skip
        model.eval()

    @torch.no_grad()
    def make(self, group: dict, done: Callable[[int], None] | None = None) -> list[tuple[np.ndarray, np.ndarray]]:
        """Keys (n, C) and values (n,) of each batch of a group (see Groups), in corpus order.

        Args:
            done: told how many are made, from any thread
        """

        def make_some(batch: dict) -> tuple[np.ndarray, np.ndarray]:
            keys, values = self._entries(batch)
            if done is not None:
                done(len(values))
            return keys, values

        for batch in group["warm_up"]:  # what a model with a memory has to read before the batches
            self._model(**batch["net_input"], features_only=True)
        batches = group["batches"]
        made = for_each_batch(self._model, make_some, batches)
        return _by_segment(batches, made, self._skip) if in_lanes(batches) else made

    def learn_codec(self, groups: Groups, form: KeyForm) -> LearntCodec:
        """How to make keys compact, from those of some groups."""
        logger.info(
            f"learning how to store keys of {form.source_dim} dimensions as {form.dim} x {form.dtype}, from a sample"
        )
        with progress("sampling keys", 0, " keys") as bar:
            sample = np.concatenate([keys for group in groups for keys, _ in self.make(group, bar.update)])
        return learn_codec(sample, form)

    def _entries(self, batch: dict) -> tuple[np.ndarray, np.ndarray]:
        own = own_positions(batch, self._skip)
        keys = self._extractor.run(self._model, batch["net_input"])[own]
        return keys.float().cpu().numpy(), batch["target"][own].cpu().numpy()


def _by_segment(
    batches: list[dict], made: list[tuple[np.ndarray, np.ndarray]], skip: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Entries of batches in lanes, those of each segment together and in corpus order."""
    order = corpus_order(batches, skip).numpy()
    keys, values = (np.concatenate(parts)[order] for parts in zip(*made))
    ends = np.cumsum([len(tokens) for tokens in rows_in_order(batches)])[:-1]
    return list(zip(np.split(keys, ends), np.split(values, ends)))


class KeyDumper:
    """Writes the keys and values of batches, which come in corpus order, to the shards of a plan."""

    def __init__(self, entries: EntryMaker, plan: DumpPlan):
        self._entries, self._plan = entries, plan
        self._pending = list(plan.shards)
        self._shard: Shard | None = None  # that the next rows belong to
        self._rows = 0  # of it that have come
        self._open: ShardWriter | None = None  # None: another process has written this shard meanwhile

    def dump(self, group: dict, done: Callable[[int], None]) -> None:
        for keys, values in self._entries.make(group, done):
            self._append(keys, values)

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
        groups: Groups | None,
        dumper: KeyDumper,
        plan: DumpPlan,
        when_complete: Callable[[], None],
    ):
        """
        Args:
            groups: None where every shard of this process is written already
            when_complete: called if the datastore is finished then
        """
        self._groups, self._dumper, self._plan, self._when_complete = groups, dumper, plan, when_complete
        show_own_progress()

    def __len__(self) -> int:
        return len(self._groups) if self._groups is not None else 0

    def __iter__(self) -> Iterator[dict]:
        folder = self._plan.folder
        rows, seconds = 0, 0.0
        with resumable(f"the finished shards are in {folder}; run the same command again to continue"):
            if self._groups is not None:
                started, rows = time.perf_counter(), sum(shard.rows for shard in self._plan.shards)
                with progress("dumping", rows, " entries") as bar:
                    for group in self._groups:
                        self._dumper.dump(group, bar.update)
                        yield {}  # one step of eval_lm, which passes over a sample without net_input
                seconds = time.perf_counter() - started
                logger.info(f"dumped {rows:,} entries in {seconds:.1f}s ({rows / seconds:.2f} tokens/s)")
            self._finish(rows, seconds)

    def _finish(self, rows: int, seconds: float) -> None:
        writer, folder = self._plan.writer, self._plan.folder
        missing, indexes = 0, []
        if writer.finish():
            logger.info(f"{folder} is complete: {writer.manifest.entries:,} entries")
            self._when_complete()
            indexes = [describe_index(info) for info in list_indexes(Datastore(folder))]
        else:
            missing = len(writer.missing_shards())
            logger.info(f"this part is done; {missing} shards of other parts are still missing in {folder}")
        end_with(dump_summary(folder, writer.manifest, rows, seconds, missing, indexes), with_loss=False)
