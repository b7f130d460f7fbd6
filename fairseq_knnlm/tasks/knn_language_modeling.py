"""The task ``knn_language_modeling``: stock language modelling plus the ``--knn-`` flags.

It turns flags into the objects that do the work (a dump plan, or memories for the scorer) and hands them to the stock
``fairseq-eval-lm``, which knows nothing of them.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fairseq import utils
from fairseq.data import Dictionary, data_utils
from fairseq.modules import LearnedPositionalEmbedding
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask

from ..data.context_blocks import ContextBlockDataset
from ..data.dictionaries import dictionary_facts
from ..data.parts import ReadingPlan, contiguous_part
from ..datastore import Datastore
from ..datastore.dump_plan import DumpPlan, sample_blocks
from ..datastore.key_codec import SAMPLE_ROWS, LearntCodec
from ..errors import KnnlmError
from ..index import build_index_if_missing
from ..keys import DEFAULT_KEY, KeyExtractor, Model, check_model, resolve_layer, weights_fingerprint
from ..keys.running import runs_in_threads
from ..memory import ContinuousCache, DatastoreMemory, Documents, Memory, name_memories
from ..memory.opening import find_documents, open_cache, open_datastores
from ..mixture.generation import KNNLanguageModel
from ..mixture.scoring import is_standard_decoder
from ..saved_runs.format import RunFacts, SaveWriter
from ..storage import file_sha256
from .config import KNNLanguageModelingConfig, check_dump_flags, refuse_idle_flags
from .dumping import DumpBatches, EntryMaker, KeyDumper, key_form
from .eval_lm import GroupedBatches, ScoredBatches, install_scorer
from .scorer import KNNSequenceScorer

logger = logging.getLogger(__name__)

# A CPU gains nothing from large batches, and is faster on those that stay in its caches, one per thread; some are given
# to the scorer at once, then. Scores do not depend on the batch.
CPU_BATCH_TOKENS = 1024
CPU_GROUP_TOKENS = 1 << 15


@register_task("knn_language_modeling", dataclass=KNNLanguageModelingConfig)
class KNNLanguageModelingTask(LanguageModelingTask):
    """Language modelling that memorises a corpus and predicts with it."""

    # The last model built and the last split loaded: fairseq does not pass them to eval_lm_dataloader.
    built: Model | None = None
    split = ""
    mixture: KNNLanguageModel | None = None  # that build_generator made of the LM and its memories

    def build_model(self, args: Any, from_checkpoint: bool = False) -> Model:
        self.built = super().build_model(args, from_checkpoint)
        return self.model

    @property
    def model(self) -> Model:
        if self.built is None:
            raise RuntimeError("the task has built no model yet")
        return self.built

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> Any:
        if self.args.tokens_per_sample <= 0:
            raise KnnlmError(
                "--tokens-per-sample includes the context, so it must be larger than --context-window "
                f"(what is left is {self.args.tokens_per_sample})"
            )
        path = self._split_path(split, epoch)
        empty = KnnlmError(f"the split {path} is empty; binarise a text with at least one line")
        binary = Path(f"{path}.bin")
        if binary.exists() and binary.stat().st_size == 0:  # which fairseq cannot map
            raise empty
        lines = data_utils.load_indexed_dataset(path, self.dictionary, self.args.dataset_impl, combine=combine)
        if lines is None:
            raise KnnlmError(f"there is no split {path}; run fairseq-preprocess, or choose another --gen-subset")
        if len(lines) == 0:
            raise empty
        self.split = split
        return super().load_dataset(split, epoch, combine, **kwargs)

    def _split_path(self, split: str, epoch: int = 1) -> str:
        folders = utils.split_paths(self.args.data)
        return os.path.join(folders[(epoch - 1) % len(folders)], split)

    def eval_lm_dataloader(
        self,
        dataset: Any,
        max_tokens: int | None = 36000,
        batch_size: int | None = None,
        max_positions: int | None = None,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 1,
        data_buffer_size: int = 10,
        context_window: int = 0,
    ) -> Iterable[dict]:
        """Prepare what the flags ask for; batches of the corpus in order, a shard being a contiguous part of it."""
        self._check_lengths(dataset, max_positions, context_window)
        rows = np.asarray(dataset.sizes, np.int64)
        if max_tokens and next(self.model.parameters()).device.type == "cpu":
            max_tokens = min(max_tokens, max(CPU_BATCH_TOKENS, self.args.tokens_per_sample))
        sizes = {
            "max_tokens": max_tokens, "max_sentences": batch_size, "num_workers": num_workers,
            "data_buffer_size": data_buffer_size,
        }  # fmt: skip

        def batches_of(plan: ReadingPlan) -> Any:
            return self._batches_of(dataset, plan.ranges, context_window, **sizes)

        if self.args.knn_dump:
            return self._dump(rows, num_shards, shard_id, context_window, batches_of)
        part = contiguous_part(len(dataset), num_shards, shard_id)
        plan = ReadingPlan.of(rows, [part], self.args.knn_cache_size + self._model_memory())
        return self._score(plan, context_window, batches_of)

    def _batches_of(self, dataset: Any, ranges: list[tuple[int, int]], context_window: int, **sizes: Any) -> Any:
        """An iterator over the batches of some ranges of blocks, in order."""
        blocks = ContextBlockDataset(dataset, self.args.tokens_per_sample, context_window, ranges)
        return self.get_batch_iterator(dataset=blocks, **sizes).next_epoch_itr(shuffle=False)

    def _model_memory(self) -> int:
        """How many tokens before a block the model must have read. None: a block brings its own context."""
        return 0

    def _check_lengths(self, dataset: Any, max_positions: int | None, context_window: int) -> None:
        """Refuse what fairseq would drop in silence (blocks that are too long) or crash on."""
        longest = int(dataset.sizes.max())
        learned = isinstance(getattr(self.model.decoder, "embed_positions", None), LearnedPositionalEmbedding)
        with_context = longest + context_window if learned else longest  # sinusoids extrapolate
        if max_positions is not None and with_context > max_positions:
            raise KnnlmError(
                f"samples of {with_context} tokens do not fit the model's {max_positions} positions; "
                f"use --tokens-per-sample {max_positions} or less (it includes --context-window)"
            )

    @property
    def _bos_tokens(self) -> int:
        """How many tokens in front of each block are not from the corpus."""
        return 1 if self.args.add_bos_token else 0

    # --- generating -------------------------------------------------------------------------------------------------

    def build_generator(self, models: list[Model], args: Any, *extra: Any, **kwargs: Any) -> Any:
        """The stock generator; with ``--knn-datastore`` on a model whose probabilities are the mixture's."""
        for flag in ("knn_dump", "knn_cache_size", "knn_save"):
            if getattr(self.args, flag):
                name = "--" + flag.replace("_", "-")
                raise KnnlmError(f"{name} is for fairseq-eval-lm; generate without it")
        refuse_idle_flags(self.args)
        if self.args.knn_datastore:
            if len(models) != 1:
                raise KnnlmError("--knn-datastore goes with one checkpoint; give --path only one")
            self.mixture = KNNLanguageModel(models[0], self._open_datastores(models[0]))
            models = [self.mixture]
        return super().build_generator(models, args, *extra, **kwargs)

    def inference_step(
        self, generator: Any, models: list[Model], sample: dict, prefix_tokens: Any = None, constraints: Any = None
    ) -> Any:
        if isinstance(generator, SequenceScorer):  # --score-reference
            scored = models if self.mixture is None else [self.mixture]
            return super().inference_step(generator, scored, sample, prefix_tokens, constraints)
        model = generator.model.single_model
        if not isinstance(model, KNNLanguageModel):
            return super().inference_step(generator, models, sample, prefix_tokens, constraints)
        started, search, steps = time.perf_counter(), model.search_seconds, model.steps
        result = super().inference_step(generator, models, sample, prefix_tokens, constraints)
        seconds, search, steps = time.perf_counter() - started, model.search_seconds - search, model.steps - steps
        if steps:
            logger.info(
                f"kNN-LM: {steps} steps of {1000 * seconds / steps:.1f} ms, of which model "
                f"{1000 * (seconds - search) / steps:.1f} ms and search {1000 * search / steps:.1f} ms"
            )
        return result

    def build_dataset_for_inference(self, src_tokens: Any, src_lengths: Any, **kwargs: Any) -> Any:
        longest, limit = int(max(src_lengths)), self.model.max_positions()
        if limit is not None and longest >= limit:  # fairseq's own message is a traceback
            raise KnnlmError(
                f"a prompt has {longest - 1} tokens, but the model has {limit} positions; shorten it to leave room for "
                "what is to be generated"
            )
        return super().build_dataset_for_inference(src_tokens, src_lengths, **kwargs)

    # --- dumping ---------------------------------------------------------------------------------------------------

    def _dump(
        self, rows: np.ndarray, num_parts: int, part: int, context_window: int, batches_of: Callable[[ReadingPlan], Any]
    ) -> DumpBatches:
        """What eval_lm iterates over to write the missing shards of a part."""
        check_dump_flags(self.args, self.targets)
        check_model(self.model)
        form = key_form(self.model, self.args)
        facts: dict[str, Any] = {
            **form.facts(),
            "key": str(self.args.knn_key or DEFAULT_KEY),
            "layer": resolve_layer(self.model.decoder, self.args.knn_layer),
            "vocabulary_size": len(self.target_dictionary),
            "source": self._source(context_window),
        }
        extractor = KeyExtractor(self.model, facts["key"], facts["layer"])
        entries = EntryMaker(self.model, extractor, self._bos_tokens)

        def groups_of(ranges: list[tuple[int, int]]) -> GroupedBatches:
            reading = ReadingPlan.of(rows, ranges, self._model_memory())
            return GroupedBatches(batches_of(reading), self._group_tokens(), reading)

        def make_codec() -> LearntCodec:
            return entries.learn_codec(groups_of(sample_blocks(rows, SAMPLE_ROWS)), form)

        own_part = partial(contiguous_part, num_parts=num_parts, part=part)
        plan = DumpPlan(self.args.knn_dump, facts, rows, own_part, make_codec if form.is_compact else None)
        plan.announce()
        groups = groups_of(plan.block_ranges) if plan.shards else None
        return DumpBatches(groups, KeyDumper(entries, plan), plan, lambda: self._build_index(plan))

    def _build_index(self, plan: DumpPlan) -> None:
        if self.args.knn_index:
            build_index_if_missing(Datastore(plan.folder), self.args.knn_index, str(self.args.knn_metric))

    def _group_tokens(self) -> int:
        """How many tokens to take at once, so that every thread has some batches."""
        return CPU_GROUP_TOKENS if runs_in_threads(self.model) else 0

    def _source(self, context_window: int) -> dict[str, Any]:
        """What the states and tokens of this run come from."""
        path = Path(self._split_path(self.split))
        binary = path.with_name(path.name + ".bin")
        return {
            "data": str(path.parent.resolve()),
            "split": self.split,
            "data_sha256": file_sha256(binary if binary.exists() else path),
            **dictionary_facts(self.target_dictionary),
            "checkpoint_sha256": weights_fingerprint(self.model),
            "tokens_per_sample": self.args.tokens_per_sample + context_window,
            "context_window": context_window,
            "sample_break_mode": str(self.args.sample_break_mode),
            "add_bos_token": self.args.add_bos_token,
            "fp16": next(self.model.parameters()).element_size() == 2,
        }

    # --- scoring ---------------------------------------------------------------------------------------------------

    def _score(
        self, plan: ReadingPlan, context_window: int, batches_of: Callable[[ReadingPlan], Any]
    ) -> Iterable[dict]:
        """What eval_lm iterates over to score a part of the split, with our scorer in the place of fairseq's."""
        refuse_idle_flags(self.args)
        memories: list[Memory] = list(self._open_datastores(self.model))
        if self.args.knn_cache_size:
            memories.append(self._open_cache(memories, plan))
        elif not (memories or self.args.knn_save or is_standard_decoder(self.model)):
            return batches_of(plan)  # a model we know nothing of and nothing to add: the stock scorer
        save = self._open_save(memories, plan, context_window) if self.args.knn_save else None

        def make_scorer(dictionary: Dictionary, softmax_batch: int | None = None, **_: Any) -> KNNSequenceScorer:
            return KNNSequenceScorer(dictionary, softmax_batch, memories, save, self._bos_tokens)

        tokens = max([self._group_tokens(), *(memory.preferred_queries for memory in memories)])
        return ScoredBatches(GroupedBatches(batches_of(plan), tokens, plan), install_scorer(make_scorer))

    def _open_datastores(self, model: Model) -> list[DatastoreMemory]:
        if not self.args.knn_datastore:
            return []
        return open_datastores(self.args, model, dictionary_facts(self.target_dictionary))

    def _open_cache(self, memories: list[Memory], plan: ReadingPlan) -> ContinuousCache:
        datastores = [memory for memory in memories if isinstance(memory, DatastoreMemory)]
        documents = self._documents(corpus_size=int(plan.rows.sum()))
        return open_cache(self.args, self.model, datastores, documents, plan.first_read)

    def _open_save(self, memories: list[Memory], plan: ReadingPlan, context_window: int) -> SaveWriter:
        if not is_standard_decoder(self.model):
            raise KnnlmError("--knn-save needs a fairseq Transformer decoder; score without it")
        start, stop = plan.scored_tokens
        facts = RunFacts(self._source(context_window), start, stop, int(plan.rows.sum()), name_memories(memories))
        save = SaveWriter(self.args.knn_save, facts)
        logger.info(save.describe())
        return save

    def _documents(self, corpus_size: int) -> Documents | None:
        if self.args.knn_cache_boundary is None:
            return None
        path = self._split_path(self.split)
        lines = data_utils.load_indexed_dataset(path, self.dictionary, self.args.dataset_impl)
        if int(np.sum(lines.sizes)) != corpus_size:
            raise KnnlmError("--knn-cache-boundary needs every token of the text; use --sample-break-mode none")
        return find_documents(lines, self.dictionary, self.args.knn_cache_boundary)
