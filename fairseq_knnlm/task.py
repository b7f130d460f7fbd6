"""The task ``knn_language_modeling``: stock language modelling plus the ``--knn-`` flags.

It turns flags into the objects that do the work (a dump plan, or retrievers for the scorer) and hands them to the
stock ``fairseq-eval-lm``, which knows nothing of them.
"""

import hashlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from fairseq import utils
from fairseq.data import Dictionary, data_utils
from fairseq.modules import LearnedPositionalEmbedding
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask

from .blocks import ContextBlockDataset, contiguous_part, warm_up_ranges
from .cache import Documents
from .config import KNNLanguageModelingConfig
from .dump import DumpPlan, KeyDumper
from .errors import KnnlmError
from .eval_lm import EvalBatches, install_scorer
from .files import file_sha256
from .generation import KNNLanguageModel
from .keys import DEFAULT_KEY, KeyExtractor, check_model, key_dimension, resolve_layer, weights_fingerprint
from .memories import describe_memories, find_documents, open_cache, refuse_idle_flags
from .retrieval import open_retrievers
from .save import RunFacts, SaveWriter
from .scorer import KNNSequenceScorer, is_standard_decoder
from .threads import runs_in_threads

logger = logging.getLogger(__name__)

# A CPU gains nothing from large batches, and is faster on those that stay in its caches, one a thread; some are given
# to the scorer at once, then. Scores do not depend on the batch.
CPU_BATCH_TOKENS = 1024
CPU_GROUP_TOKENS = 1 << 15


@register_task("knn_language_modeling", dataclass=KNNLanguageModelingConfig)
class KNNLanguageModelingTask(LanguageModelingTask):
    """Language modelling that memorises a corpus and predicts with it."""

    # The last model built and the last split loaded: fairseq does not pass them to eval_lm_dataloader.
    model = None
    split = None

    def build_model(self, args, from_checkpoint=False):
        self.model = super().build_model(args, from_checkpoint)
        return self.model

    def load_dataset(self, split: str, epoch=1, combine=False, **kwargs):
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
        dataset,
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
        if self.args.knn_dump:
            plan = self._plan_dump(rows, num_shards, shard_id, context_window)
            scored, make_scorer, group_tokens = plan.block_ranges, self._make_dumper(plan), 0
            warm_up = warm_up_ranges(rows, scored, self._model_memory())
        else:
            scored = [contiguous_part(len(dataset), num_shards, shard_id)]
            warm_up = warm_up_ranges(rows, scored, self.args.knn_cache_size + self._model_memory())
            make_scorer, group_tokens = self._make_scorer(rows, (warm_up + scored)[0][0], *scored[0], context_window)
        if runs_in_threads(self.model):
            group_tokens = max(group_tokens, CPU_GROUP_TOKENS)
        ranges = sorted(warm_up + scored)
        if max_tokens and next(self.model.parameters()).device.type == "cpu":
            max_tokens = min(max_tokens, max(CPU_BATCH_TOKENS, self.args.tokens_per_sample))
        batches = self._batches_of(
            dataset, ranges, context_window, max_tokens=max_tokens, max_sentences=batch_size, num_workers=num_workers,
            data_buffer_size=data_buffer_size,
        )  # fmt: skip
        tokens = sum(int(rows[start:stop].sum()) for start, stop in ranges)
        batches_at_once = max(1, round(group_tokens * len(batches) / tokens)) if tokens else 1
        return EvalBatches(batches, batches_at_once, install_scorer(make_scorer), warm_up)

    def _batches_of(self, dataset, ranges: list[tuple[int, int]], context_window: int, **sizes):
        """An iterator over the batches of some ranges of blocks, in order."""
        blocks = ContextBlockDataset(dataset, self.args.tokens_per_sample, context_window, ranges)
        return self.get_batch_iterator(dataset=blocks, **sizes).next_epoch_itr(shuffle=False)

    def _model_memory(self) -> int:
        """How many tokens before a block the model must have read. None: a block brings its own context."""
        return 0

    def _check_lengths(self, dataset, max_positions: int | None, context_window: int) -> None:
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

    def build_generator(self, models, args, *extra, **kwargs):
        """The stock generator; with ``--knn-datastore`` on a model whose probabilities are the mixture's."""
        for flag in ("knn_dump", "knn_cache_size", "knn_save"):
            if getattr(self.args, flag):
                name = "--" + flag.replace("_", "-")
                raise KnnlmError(f"{name} is for fairseq-eval-lm; generate without it")
        refuse_idle_flags(self.args)
        if self.args.knn_datastore:
            if len(models) != 1:
                raise KnnlmError("--knn-datastore goes with one checkpoint; give --path only one")
            check_model(models[0])
            retrievers = open_retrievers(self.args, models[0], dictionary_facts(self.target_dictionary))
            models = [KNNLanguageModel(models[0], retrievers)]
        return super().build_generator(models, args, *extra, **kwargs)

    def inference_step(self, generator, models, sample, prefix_tokens=None, constraints=None):
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

    def build_dataset_for_inference(self, src_tokens, src_lengths, **kwargs):
        longest, limit = int(max(src_lengths)), self.model.max_positions()
        if limit is not None and longest >= limit:  # fairseq's own message is a traceback
            raise KnnlmError(
                f"a prompt has {longest - 1} tokens, but the model has {limit} positions; shorten it to leave room for "
                "what is to be generated"
            )
        return super().build_dataset_for_inference(src_tokens, src_lengths, **kwargs)

    # --- dumping ---------------------------------------------------------------------------------------------------

    def _plan_dump(self, rows: np.ndarray, num_parts: int, part: int, context_window: int) -> DumpPlan:
        if self.args.knn_datastore:
            raise KnnlmError("--knn-dump and --knn-datastore are two runs: dump first, then score")
        if self.args.knn_cache_size or self.args.knn_save:
            raise KnnlmError("--knn-cache-size and --knn-save are for scoring; dump without them")
        if self.targets != ["future"]:
            raise KnnlmError("a datastore holds next tokens; dump without --self-target and --past-target")
        check_model(self.model)
        facts = {
            "dim": key_dimension(self.model),
            "key_dtype": str(self.args.knn_key_dtype),
            "key": str(self.args.knn_key or DEFAULT_KEY),
            "layer": resolve_layer(self.model.decoder, self.args.knn_layer),
            "vocabulary_size": len(self.target_dictionary),
            "source": self._source(context_window),
        }
        return DumpPlan(self.args.knn_dump, facts, rows, num_parts, part)

    def _make_dumper(self, plan: DumpPlan):
        def build_index() -> None:
            if self.args.knn_index:
                from .datastore import Datastore
                from .index import build_index_if_missing

                build_index_if_missing(Datastore(plan.folder), self.args.knn_index, str(self.args.knn_metric))

        plan.announce()
        if not plan.shards:
            if plan.writer.finish():
                build_index()
            # fairseq would go on to report a perplexity of 1 over no tokens.
            raise SystemExit(0)
        manifest = plan.writer.manifest
        extractor = KeyExtractor(self.model, manifest.key, manifest.layer)
        return lambda dictionary, *_, **__: KeyDumper(dictionary, plan, extractor, self._bos_tokens, build_index)

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

    def _make_scorer(self, rows: np.ndarray, warm_up: int, first: int, last: int, context_window: int):
        """A factory in the place of fairseq's SequenceScorer, and how many tokens to give it at once.

        Args:
            rows: tokens of each block
            warm_up, first, last: the cache sees blocks from warm_up on, [first, last) are scored
        """
        refuse_idle_flags(self.args)
        retrievers, cache, save = [], None, None
        if self.args.knn_datastore:
            check_model(self.model)
            retrievers = open_retrievers(self.args, self.model, dictionary_facts(self.target_dictionary))
        if self.args.knn_cache_size:
            documents = self._documents(corpus_size=int(rows.sum()))
            cache = open_cache(self.args, self.model, retrievers, documents, position=int(rows[:warm_up].sum()))
        elif not (retrievers or self.args.knn_save or is_standard_decoder(self.model)):
            return None, 0  # a model we know nothing of and nothing to add: the stock scorer
        if self.args.knn_save:
            if not is_standard_decoder(self.model):
                raise KnnlmError("--knn-save needs a fairseq Transformer decoder; score without it")
            start, stop = int(rows[:first].sum()), int(rows[:last].sum())
            memories = describe_memories(retrievers, cache)
            save = SaveWriter(
                self.args.knn_save, RunFacts(self._source(context_window), start, stop, int(rows.sum()), memories)
            )
            logger.info(save.describe())
        group_tokens = max((retriever.preferred_queries for retriever in retrievers), default=0)

        def make_scorer(dictionary: Dictionary, softmax_batch: int | None = None, **_) -> KNNSequenceScorer:
            return KNNSequenceScorer(dictionary, softmax_batch, retrievers, cache, save, self._bos_tokens)

        return make_scorer, group_tokens

    def _documents(self, corpus_size: int) -> Documents | None:
        if self.args.knn_cache_boundary is None:
            return None
        path = self._split_path(self.split)
        lines = data_utils.load_indexed_dataset(path, self.dictionary, self.args.dataset_impl)
        if int(np.sum(lines.sizes)) != corpus_size:
            raise KnnlmError("--knn-cache-boundary needs every token of the text; use --sample-break-mode none")
        return find_documents(lines, self.dictionary, self.args.knn_cache_boundary)


def dictionary_facts(dictionary: Dictionary) -> dict[str, Any]:
    """What identifies a dictionary: its symbols in order (counts may differ)."""
    symbols = "\n".join(dictionary.symbols)
    return {
        "dictionary_sha256": hashlib.sha256(symbols.encode()).hexdigest(),
        "dictionary_size": len(dictionary),
    }
