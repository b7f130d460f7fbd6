"""The task ``spalm``: language modelling over lanes with memory, and retrieved tokens beside the text."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import numpy as np
from fairseq.data import data_utils, iterators
from fairseq.tasks import register_task

from ..config import KNNLanguageModelingConfig
from ..errors import KnnlmError
from ..eval_lm import EvalBatches, install_scorer
from ..memories import refuse_idle_flags
from ..scorer import KNNSequenceScorer
from ..task import KNNLanguageModelingTask
from .lanes import LaneDataset
from .neighbors import NeighborTable


@dataclass
class SPALMTaskConfig(KNNLanguageModelingConfig):
    neighbors: Optional[str] = field(
        default=None,
        metadata={"help": "folder with a table of retrieved tokens for each split: DIR/train, DIR/valid, DIR/test"},
    )


@register_task("spalm", dataclass=SPALMTaskConfig)
class SPALMTask(KNNLanguageModelingTask):
    """For ``transformer_xl_lm`` and ``spalm_lm``; --tokens-per-sample is the segment, --batch-size the lanes."""

    def load_dataset(self, split: str, epoch=1, combine=False, **kwargs):
        path = self._split_path(split, epoch)
        lines = data_utils.load_indexed_dataset(path, self.dictionary, self.args.dataset_impl, combine=combine)
        if lines is None or len(lines) == 0:
            raise KnnlmError(f"there is no split {path}, or it is empty; run fairseq-preprocess")
        if self.args.tokens_per_sample < 1:
            raise KnnlmError("--tokens-per-sample must be 1 or more; SPALM takes no --context-window, it has a memory")
        tokens = np.concatenate([line.numpy() for line in lines])
        self.split = split  # which _source describes
        self.datasets[split] = LaneDataset(
            split, tokens, self.dictionary, lanes=1, length=self.args.tokens_per_sample,
            neighbors=self._open_neighbors(split, len(tokens)),
        )  # fmt: skip

    def _open_neighbors(self, split: str, tokens: int) -> NeighborTable | None:
        """The table of a split, checked against text, dictionary and model before anything is computed."""
        needed = getattr(getattr(self.model, "decoder", None), "neighbors_used", 0)
        if bool(needed) != bool(self.args.neighbors):
            if needed:
                raise KnnlmError(f"SPALM reads {needed} retrieved tokens; run knnlm neighbors, then give --neighbors")
            raise KnnlmError("this model reads no retrieved tokens; leave out --neighbors")
        if not needed:
            return None
        table = NeighborTable(Path(self.args.neighbors) / split)
        remedy = f"run knnlm neighbors for this {split}, or choose another --neighbors"
        made_for, source = table.facts.queries, self._source(0)
        if made_for.get("dictionary_sha256") != source["dictionary_sha256"]:
            raise KnnlmError(f"{table.folder} was made with another dictionary; {remedy}")
        if len(table) != tokens or made_for.get("data_sha256") != source["data_sha256"]:
            raise KnnlmError(
                f"{table.folder} was made for another text ({len(table):,} tokens, here {tokens:,}); {remedy}"
            )
        if table.k < needed:
            raise KnnlmError(
                f"{table.folder} has {table.k} neighbours a token but the model reads {needed}; run knnlm neighbors "
                f"--k {needed}, or lower --neighbors-used"
            )
        return table

    def get_batch_iterator(
        self, dataset, max_tokens=None, max_sentences=None, seed=1, num_shards=1, shard_id=0, num_workers=0, epoch=1,
        data_buffer_size=0, **kwargs,
    ):  # fmt: skip
        """Segments in order, a lane always in the same row; nothing is shuffled."""
        if not max_sentences:
            raise KnnlmError("give the number of lanes with --batch-size; --max-tokens does not say it")
        lanes = LaneDataset(
            dataset.text, dataset.tokens, dataset.dictionary, max_sentences * num_shards, dataset.length,
            dataset.neighbors, num_shards,
        )  # fmt: skip
        return iterators.EpochBatchIterator(
            dataset=lanes, collate_fn=lanes.collater, batch_sampler=lanes.batches(), seed=seed, num_shards=num_shards,
            shard_id=shard_id, num_workers=num_workers, epoch=epoch, buffer_size=data_buffer_size,
            disable_shuffling=True,
        )  # fmt: skip

    def build_generator(self, models, args, *extra, **kwargs):
        raise KnnlmError(
            "SPALM cannot generate: each new token would need a search with the frozen LM that made the table of "
            "neighbours; generate with a kNN-LM (fairseq-interactive --task knn_language_modeling --knn-datastore)"
        )

    def eval_lm_dataloader(self, dataset, num_shards=1, shard_id=0, num_workers=1, **kwargs) -> Iterable[dict]:
        """One lane, so that every token sees all of the memory that the model may have."""
        if num_shards != 1 or kwargs.get("context_window"):
            raise KnnlmError("SPALM reads its text in one piece; leave out --num-shards and --context-window")
        for flag in ("knn_datastore", "knn_dump", "knn_cache_size", "knn_save"):
            if getattr(self.args, flag):
                raise KnnlmError(f"--{flag.replace('_', '-')} does not work with the task spalm yet; leave it out")
        refuse_idle_flags(self.args)
        batches = self.get_batch_iterator(dataset, max_sentences=1, num_workers=num_workers).next_epoch_itr(False)

        def make_scorer(dictionary, softmax_batch: int | None = None, **_) -> KNNSequenceScorer:
            return KNNSequenceScorer(dictionary, softmax_batch, [])

        return EvalBatches(batches, 1, install_scorer(make_scorer))
