"""The task ``knn_language_modeling``: stock language modelling plus the ``--knn-`` flags.

It turns flags into the objects that do the work (a dump plan, or memories for the scorer) and hands them to the stock
``fairseq-eval-lm``, which knows nothing of them.
"""

import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fairseq import utils
from fairseq.data import Dictionary, data_utils
from fairseq.tasks import register_task

from ..criterions import soft_labels  # noqa: F401  registers the criterion, which fairseq does not look for
from ..criterions.label_sources import LabelledBlocks, SoftLabels
from ..data.context_blocks import ContextBlockDataset
from ..data.dictionaries import dictionary_facts
from ..data.parts import ReadingPlan, contiguous_part
from ..data.splits import check_dictionary_exists, check_split
from ..data.text_counts import TextCounts, count_text, has_counts
from ..errors import KnnlmError
from ..keys import Model, weights_fingerprint
from ..keys.running import runs_in_threads
from ..memory import ContinuousCache, DatastoreMemory, Documents, HeadMemory, Memory, name_memories
from ..memory.opening import find_documents, open_cache
from ..mixture.gate import Gate
from ..mixture.lm_features import LM_FEATURES
from ..mixture.scoring import is_standard_decoder
from ..saved_runs.format import RunFacts, SaveWriter
from ..storage import file_sha256
from .config import KNNLanguageModelingConfig, check_dump_flags, refuse_idle_flags
from .context import check_lengths, trained_length, warn_of_long_context, warn_of_other_context
from .dump_preparation import DumpedText, prepare_dump
from .dumping import DumpBatches
from .eval_lm import GroupedBatches, Groups, ScoredBatches, install_scorer, load_several_models
from .gating import attach, open_gate, open_gated_memories, with_gate_values
from .generating import GeneratingTask
from .scorer import KNNSequenceScorer

logger = logging.getLogger(__name__)

# A CPU gains nothing from large batches, and is faster on those that stay in its caches, one per thread; some are given
# to the scorer at once, then. Scores do not depend on the batch.
CPU_BATCH_TOKENS = 1024
CPU_GROUP_TOKENS = 1 << 15


@register_task("knn_language_modeling", dataclass=KNNLanguageModelingConfig)
class KNNLanguageModelingTask(GeneratingTask):
    """Language modelling that memorises a corpus and predicts with it."""

    split = ""  # the last one loaded: fairseq does not pass it to eval_lm_dataloader
    trained_tokens: int | None = None  # of a sample in training
    soft_labels: SoftLabels | None = None  # of the training split, which --criterion soft_labels reads

    @classmethod
    def setup_task(cls, args: Any, **kwargs: Any) -> "KNNLanguageModelingTask":
        load_several_models()
        return super().setup_task(args, **kwargs)

    @classmethod
    def setup_dictionary(cls, args: Any, **kwargs: Any) -> tuple[Dictionary, Dictionary]:
        if args.data:
            check_dictionary_exists(args.data)
        return super().setup_dictionary(args, **kwargs)

    def build_model(self, args: Any, from_checkpoint: bool = False) -> Model:
        self.models.append(super().build_model(args, from_checkpoint))
        self.trained_tokens = min(filter(None, (self.trained_tokens, trained_length(args))), default=None)
        return self.models[-1]

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        if self.args.tokens_per_sample <= 0:
            raise KnnlmError(
                "--tokens-per-sample includes the context, so it must be larger than --context-window "
                f"(what is left is {self.args.tokens_per_sample})"
            )
        check_split(self._split_path(split, epoch), self.dictionary, self.args.dataset_impl, combine)
        self.split = split
        super().load_dataset(split, epoch, combine, **kwargs)
        if self.soft_labels is not None and self.soft_labels.split == split:
            facts = dictionary_facts(self.target_dictionary)
            self.datasets[split] = LabelledBlocks(self.datasets[split], self.soft_labels, facts)

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
        if self.text.has_own_tokenizer and (self._bos_tokens or self.targets != ["future"]):
            raise KnnlmError(
                "a model of Hugging Face predicts the tokens of its tokenizer; leave out --add-bos-token, "
                "--self-target and --past-target"
            )
        check_lengths(self.model, int(dataset.sizes.max()), max_positions, context_window)
        if not self._model_memory():  # a model with a memory reads as much as it likes
            warn_of_long_context(self.trained_tokens, self.args.tokens_per_sample + context_window)
        rows = np.asarray(dataset.sizes, np.int64)
        if max_tokens and next(self.model.parameters()).device.type == "cpu":
            max_tokens = min(max_tokens, max(CPU_BATCH_TOKENS, self.args.tokens_per_sample))
        num_workers = 0 if str(self.args.knn_engine) == "ray" else num_workers  # forked beside Ray, one may hang
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
        # Blocks that are lines of their own begin as a text does; all others with the token that stands before them.
        alone = str(self.args.sample_break_mode) != "none" and context_window == 0
        joined = self.text.has_own_tokenizer and not alone
        blocks = ContextBlockDataset(dataset, self.args.tokens_per_sample, context_window, ranges, joined)
        return self.get_batch_iterator(dataset=blocks, **sizes).next_epoch_itr(shuffle=False)

    def _grouped(self, batches_of: Callable[[ReadingPlan], Any], plan: ReadingPlan, tokens: int) -> Groups:
        """The batches of a plan as samples that predict about so many tokens each."""
        return GroupedBatches(batches_of(plan), tokens, plan)

    def _model_memory(self) -> int:
        """How many tokens before a block the model must have read. None: a block brings its own context."""
        return 0

    @property
    def _bos_tokens(self) -> int:
        """How many tokens in front of each block are not from the corpus."""
        return 1 if self.args.add_bos_token else 0

    # --- dumping ---------------------------------------------------------------------------------------------------

    def _dump(
        self, rows: np.ndarray, num_parts: int, part: int, context_window: int, batches_of: Callable[[ReadingPlan], Any]
    ) -> DumpBatches | list[dict]:
        """What eval_lm iterates over to write the missing shards of a part."""
        check_dump_flags(self.args, self.targets, len(self.models))

        def groups_of(ranges: list[tuple[int, int]]) -> Groups:
            reading = ReadingPlan.of(rows, ranges, self._model_memory())
            return self._grouped(batches_of, reading, self._group_tokens())

        own_part = partial(contiguous_part, num_parts=num_parts, part=part)
        text = DumpedText(rows, own_part, self._source(context_window), len(self.target_dictionary), self._bos_tokens)
        return prepare_dump(self.args, self.model, text, groups_of)

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
        gate, dictionary = open_gate(self.args), self.target_dictionary
        memories = open_gated_memories(self.args, gate, self.model, dictionary)
        if datastores := [memory.datastore for memory in memories if isinstance(memory, DatastoreMemory)]:
            warn_of_other_context(datastores, self._source(context_window))
        if self.args.knn_cache_size:
            memories.append(self._open_cache(memories, plan, gate))
        elif not (memories or self.args.knn_save or is_standard_decoder(self.model)):
            return batches_of(plan)  # a model we know nothing of and nothing to add: the stock scorer
        if len(self.models) > 1 and not is_standard_decoder(self.model):
            raise KnnlmError("several checkpoints with a memory must all be Transformer LMs; give --path only one")
        attach(gate, memories, self.model, dictionary)
        counts = self._count_text(plan)
        save = self._open_save(memories, plan, context_window, counts) if self.args.knn_save else None

        def make_scorer(dictionary: Dictionary, softmax_batch: int | None = None, **_: Any) -> KNNSequenceScorer:
            return KNNSequenceScorer(dictionary, softmax_batch, memories, save, self._bos_tokens, gate, counts)

        tokens = max([self._group_tokens(), *(memory.preferred_queries for memory in memories)])
        groups = self._grouped(batches_of, plan, tokens)
        return ScoredBatches(groups, install_scorer(make_scorer), plan, self._split_path(self.split))

    def _open_cache(self, memories: list[Memory], plan: ReadingPlan, gate: Gate | None) -> ContinuousCache:
        datastores = [memory for memory in memories if isinstance(memory, DatastoreMemory)]
        heads = [memory for memory in memories if isinstance(memory, HeadMemory)]
        documents = self._documents(corpus_size=int(plan.rows.sum()))
        args = with_gate_values(self.args, gate)
        return open_cache(args, self.model, datastores, documents, plan.first_read, heads)

    def _count_text(self, plan: ReadingPlan) -> TextCounts | None:
        """Words and bytes of what is scored, where the data tells."""
        path = Path(self._split_path(self.split))
        if not has_counts(path):
            return None
        lines = data_utils.load_indexed_dataset(str(path), self.dictionary, self.args.dataset_impl)
        return count_text(path, np.asarray(lines.sizes, np.int64), *plan.scored_tokens)

    def _open_save(
        self, memories: list[Memory], plan: ReadingPlan, context_window: int, counts: TextCounts | None
    ) -> SaveWriter:
        if not is_standard_decoder(self.model):
            raise KnnlmError("--knn-save needs a fairseq Transformer decoder; score without it")
        start, stop = plan.scored_tokens
        top, types = self.args.knn_save_top, len(self.target_dictionary)
        if not 0 <= top <= types:
            raise KnnlmError(f"--knn-save-top must be between 0 and the {types:,} types of the dictionary, not {top}")
        source, tokens = self._source(context_window), int(plan.rows.sum())
        facts = RunFacts(source, start, stop, tokens, name_memories(memories), features=list(LM_FEATURES), top=top)
        if counts is not None:
            facts.words, facts.bytes = counts.words, counts.bytes
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
        return find_documents(lines, self.dictionary, self.text, self.args.knn_cache_boundary)
