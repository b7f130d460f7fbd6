"""The task ``spalm``: language modelling over lanes with memory, and retrieved tokens beside the text."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from fairseq.data import data_utils, iterators
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask

from ..data.lane_reading import LaneGroups
from ..data.lanes import LaneDataset
from ..data.neighbor_table import FACTS, NeighborTable
from ..data.parts import ReadingPlan
from ..errors import KnnlmError
from ..keys import Model
from ..models.spalm_lm import SPALMDecoder  # registers spalm_lm and transformer_xl_lm, too
from ..models.transformer_xl import TransformerXLDecoder
from ..storage import file_sha256
from .config import KNNLanguageModelingConfig
from .eval_lm import Groups
from .knn_language_modeling import KNNLanguageModelingTask
from .spalm_generation import StepTimes, live_model

LANES_PER_THREAD, LANES_ON_GPU = 8, 32  # in scoring, at most; --batch-size says otherwise


@dataclass
class SPALMTaskConfig(KNNLanguageModelingConfig):
    neighbors: Optional[str] = field(
        default=None,
        metadata={"help": "folder with a table of retrieved tokens for each split: DIR/train, DIR/valid, DIR/test"},
    )
    knn_key_lm: Optional[str] = field(
        default=None,
        metadata={
            "help": "fairseq-interactive: the checkpoint of the frozen LM that made --knn-datastore, whose neighbours "
            "SPALM then reads of each new token"
        },
    )


@register_task("spalm", dataclass=SPALMTaskConfig)
class SPALMTask(KNNLanguageModelingTask):
    """For ``transformer_xl_lm`` and ``spalm_lm``; --tokens-per-sample is the segment, --batch-size the lanes."""

    _lanes_at_once: int | None = None  # --batch-size of fairseq-eval-lm

    def build_model(self, args: Any, from_checkpoint: bool = False) -> Model:
        model = super().build_model(args, from_checkpoint)
        if not isinstance(model.decoder, TransformerXLDecoder):
            raise KnnlmError(
                f"the task spalm is for spalm_lm and transformer_xl_lm, not for {type(model).__name__}; use --task "
                "knn_language_modeling"
            )
        return model

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
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
            neighbors=self._open_neighbors(split, tokens),
        )  # fmt: skip

    def _open_neighbors(self, split: str, tokens: np.ndarray) -> NeighborTable | None:
        """The table of a split, checked against text, dictionary and model before anything is computed."""
        needed = self._neighbors_needed()
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
        if len(table) != len(tokens) or made_for.get("data_sha256") != source["data_sha256"]:
            raise KnnlmError(
                f"{table.folder} was made for another text ({len(table):,} tokens, here {len(tokens):,}); {remedy}"
            )
        table.check_text(tokens)
        if table.k < needed:
            raise KnnlmError(
                f"{table.folder} has {table.k} neighbours per token but the model reads {needed}; run knnlm neighbors "
                f"--k {needed}, or lower --neighbors-used"
            )
        return table

    def _neighbors_needed(self) -> int:
        decoder = self.model.decoder if self.models else None
        return decoder.neighbors_used if isinstance(decoder, SPALMDecoder) else 0

    def get_batch_iterator(
        self, dataset: Any, max_tokens: int | None = None, max_sentences: int | None = None, seed: int = 1,
        num_shards: int = 1, shard_id: int = 0, num_workers: int = 0, epoch: int = 1, data_buffer_size: int = 0,
        **kwargs: Any,
    ) -> iterators.EpochBatchIterator:  # fmt: skip
        """Segments in order, a lane always in the same row; nothing is shuffled."""
        if not isinstance(dataset, LaneDataset):  # prompts
            return super().get_batch_iterator(
                dataset, max_tokens=max_tokens, max_sentences=max_sentences, seed=seed, num_shards=num_shards,
                shard_id=shard_id, num_workers=num_workers, epoch=epoch, data_buffer_size=data_buffer_size, **kwargs,
            )  # fmt: skip
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

    def build_generator(self, models: list[Model], args: Any, *extra: Any, **kwargs: Any) -> Any:
        """The stock generator on a model that has its neighbours searched for each new token."""
        if self.datasets:  # fairseq-generate has loaded a split
            raise KnnlmError("the task spalm continues prompts; use fairseq-interactive")
        if len(models) > 1:
            raise KnnlmError("the task spalm generates with one checkpoint; give --path only one")
        if self.args.neighbors:
            raise KnnlmError("--neighbors is a table of a split; generate with --knn-key-lm and --knn-datastore")
        self.live = live_model(self.args, models[0])
        return LanguageModelingTask.build_generator(self, [self.live], args, *extra, **kwargs)

    def inference_step(
        self, generator: Any, models: list[Model], sample: dict, prefix_tokens: Any = None, constraints: Any = None
    ) -> Any:
        times = StepTimes(generator.model.single_model)
        result = LanguageModelingTask.inference_step(self, generator, models, sample, prefix_tokens, constraints)
        times.tell()
        return result

    # --- fairseq-eval-lm: lanes that first read what their states depend on, so that no token misses any memory ------

    def eval_lm_dataloader(self, dataset: Any, *args: Any, context_window: int = 0, **kwargs: Any) -> Iterable[dict]:
        if len(self.models) > 1:
            raise KnnlmError("the task spalm scores with one checkpoint; give --path only one")
        self._lanes_at_once = kwargs.get("batch_size")
        if self.args.knn_key_lm:
            raise KnnlmError(
                "--knn-key-lm is for fairseq-interactive; to score a split, make its table with knnlm neighbors and "
                "give --neighbors"
            )
        if context_window:
            raise KnnlmError("the task spalm has a memory instead of --context-window; leave that out")
        return super().eval_lm_dataloader(dataset, *args, **kwargs)

    def _grouped(self, batches_of: Callable[[ReadingPlan], Any], plan: ReadingPlan, tokens: int) -> Groups:
        if self.args.knn_cache_size:  # which remembers what was read last, so it reads in order
            return super()._grouped(batches_of, plan, tokens)
        dataset = self.datasets[self.split]
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        groups = torch.get_num_threads() if on_cpu else 1
        lanes = self._lanes_at_once or (groups * LANES_PER_THREAD if on_cpu else LANES_ON_GPU)
        return LaneGroups(dataset, plan.scored, lanes, self._model_memory(), tokens, groups)

    def _batches_of(
        self, dataset: LaneDataset, ranges: list[tuple[int, int]], context_window: int, num_workers: int = 0, **_: Any
    ) -> Any:
        segments = [[segment] for start, stop in ranges for segment in range(start, stop)]
        return iterators.EpochBatchIterator(
            dataset=dataset, collate_fn=dataset.collater, batch_sampler=segments, num_workers=num_workers,
            disable_shuffling=True,
        ).next_epoch_itr(shuffle=False)  # fmt: skip

    def _model_memory(self) -> int:
        return self.model.decoder.reach(self.args.tokens_per_sample)

    def _source(self, context_window: int) -> dict[str, Any]:
        source = super()._source(context_window) | {"memory_size": self.model.decoder.memory_size}
        if self.args.neighbors:
            source["neighbors_sha256"] = file_sha256(Path(self.args.neighbors) / self.split / FACTS)
        return source
