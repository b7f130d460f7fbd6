"""The task ``knn_language_modeling``: stock language modelling plus the ``--knn-`` flags.

It turns flags into the objects that do the work (a dump plan, or retrievers for the scorer) and hands them to the
stock ``fairseq-eval-lm``, which knows nothing of them.
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from fairseq import utils
from fairseq.data import Dictionary, data_utils
from fairseq.modules import LearnedPositionalEmbedding
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask

from .blocks import ContextBlockDataset, contiguous_part
from .config import KNNLanguageModelingConfig
from .dump import DumpPlan, KeyDumper
from .errors import KnnlmError
from .files import file_sha256
from .keys import DEFAULT_KEY, KeyExtractor, check_model, key_dimension, resolve_layer, weights_fingerprint
from .retrieval import open_retrievers
from .scorer import EvalBatches, KNNSequenceScorer, install_scorer, is_standard_decoder


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
        if self.args.knn_dump:
            plan = self._plan_dump(dataset, num_shards, shard_id, context_window)
            ranges, make_scorer, group_tokens = plan.block_ranges, self._make_dumper(plan), 0
        else:
            ranges = [contiguous_part(len(dataset), num_shards, shard_id)]
            make_scorer, group_tokens = self._make_scorer()
        blocks = ContextBlockDataset(dataset, self.args.tokens_per_sample, context_window, ranges)
        batches = self.get_batch_iterator(
            dataset=blocks,
            max_tokens=max_tokens,
            max_sentences=batch_size,
            num_workers=num_workers,
            data_buffer_size=data_buffer_size,
        ).next_epoch_itr(shuffle=False)
        tokens = blocks.num_tokens_vec(blocks.ordered_indices()).sum(dtype=int)
        batches_at_once = max(1, round(group_tokens * len(batches) / tokens)) if tokens else 1
        return EvalBatches(batches, batches_at_once, install_scorer(make_scorer))

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

    # --- dumping ---------------------------------------------------------------------------------------------------

    def _plan_dump(self, dataset, num_parts: int, part: int, context_window: int) -> DumpPlan:
        if self.args.knn_datastore:
            raise KnnlmError("--knn-dump and --knn-datastore are two runs: dump first, then score")
        if self.targets != ["future"]:
            raise KnnlmError("a datastore holds next tokens; dump without --self-target and --past-target")
        check_model(self.model)
        facts = {
            "dim": key_dimension(self.model),
            "key_dtype": str(self.args.knn_key_dtype),
            "key": str(self.args.knn_key or DEFAULT_KEY),
            "layer": resolve_layer(self.model.decoder, self.args.knn_layer),
            "vocabulary_size": len(self.target_dictionary),
            "source": {
                "data": str(Path(self._split_path(self.split)).parent.resolve()),
                "split": self.split,
                "data_sha256": self._data_fingerprint(),
                **dictionary_facts(self.target_dictionary),
                "checkpoint_sha256": weights_fingerprint(self.model),
                "tokens_per_sample": self.args.tokens_per_sample + context_window,
                "context_window": context_window,
                "sample_break_mode": str(self.args.sample_break_mode),
                "add_bos_token": self.args.add_bos_token,
                "fp16": next(self.model.parameters()).element_size() == 2,
            },
        }
        return DumpPlan(self.args.knn_dump, facts, np.asarray(dataset.sizes, np.int64), num_parts, part)

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

    def _data_fingerprint(self) -> str:
        path = Path(self._split_path(self.split))
        binary = path.with_name(path.name + ".bin")
        return file_sha256(binary if binary.exists() else path)

    # --- scoring ---------------------------------------------------------------------------------------------------

    def _make_scorer(self):
        """A factory in the place of fairseq's SequenceScorer, and how many tokens to give it at once."""
        retrievers = []
        if self.args.knn_datastore:
            check_model(self.model)
            retrievers = open_retrievers(self.args, self.model, dictionary_facts(self.target_dictionary))
        else:
            self._refuse_idle_flags()
            if not is_standard_decoder(self.model):
                return None, 0  # a model we know nothing of and nothing to add: the stock scorer
        group_tokens = max((retriever.preferred_queries for retriever in retrievers), default=0)

        def make_scorer(dictionary: Dictionary, softmax_batch: int | None = None, **_) -> KNNSequenceScorer:
            return KNNSequenceScorer(dictionary, softmax_batch, retrievers)

        return make_scorer, group_tokens

    def _refuse_idle_flags(self) -> None:
        """A flag that does nothing is a mistake worth hearing of."""
        for flag in fields(KNNLanguageModelingConfig):
            if flag.name.startswith("knn_") and str(getattr(self.args, flag.name)) != str(flag.default):
                name = "--" + flag.name.replace("_", "-")
                raise KnnlmError(f"{name} does nothing without --knn-datastore or --knn-dump; add one, or leave it out")


def dictionary_facts(dictionary: Dictionary) -> dict[str, Any]:
    """What identifies a dictionary: its symbols in order (counts may differ)."""
    symbols = "\n".join(dictionary.symbols)
    return {
        "dictionary_sha256": hashlib.sha256(symbols.encode()).hexdigest(),
        "dictionary_size": len(dictionary),
    }
