"""The corpus in order, in blocks that carry their own left context.

fairseq's ``LMContextWindowDataset`` remembers the previous batch in its collater, so it is right only in one process
that sees every batch in order. Here a block looks its context up, so blocks can be evaluated anywhere in any order.
"""

from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset, MonolingualDataset
from torch import Tensor


class ContextBlockDataset(FairseqDataset):
    """Ranges of the blocks of a dataset, each block preceded by up to ``context_window`` tokens.

    Args:
        dataset: the blocks, in corpus order
        tokens_per_sample: largest block
        context_window: how many tokens before its first one a block may see
        ranges: which blocks, as (start, stop); a batch never spans two ranges
        joined: the lines follow each other with nothing between them. fairseq takes it that every line ends with </s>,
            so it writes that before the first token of a block that begins with a line, whatever stood there.
    """

    def __init__(
        self,
        dataset: MonolingualDataset,
        tokens_per_sample: int,
        context_window: int,
        ranges: list[tuple[int, int]],
        joined: bool = False,
    ):
        self.dataset = dataset
        self.tokens_per_sample = tokens_per_sample
        self.context_window = context_window
        self.ranges = ranges
        self.joined = joined
        self._pad = dataset.vocab.pad()

    def __getitem__(self, index: int) -> dict:
        item = self.dataset[index]
        source, target = item["source"], item["target"]
        # As in fairseq: a block that is longer than usual (a <s> in front) gets that much less context.
        room = min(self.context_window, self.tokens_per_sample + self.context_window - len(source))
        if self.joined:
            context, source = self._joined_source(index, room, target)
        else:
            context = self._tokens_before(index, room, source)
        return {
            "id": index,
            "source": torch.cat([context, source]),
            "target": torch.cat([torch.full_like(context, self._pad), target]),
            "start": len(context),
        }

    def _joined_source(self, index: int, room: int, target: Tensor) -> tuple[Tensor, Tensor]:
        """What stands before a block, and its source: the tokens of the corpus, each of which is a target once."""
        before = self._tokens_before(index, room + 1, target, "target")
        if len(before) <= room:  # the beginning of the corpus
            before = torch.cat([target.new_tensor([self.dataset.vocab.eos()]), before])
        return before[:-1], torch.cat([before[-1:], target[:-1]])

    def _tokens_before(self, index: int, count: int, like: Tensor, side: str = "source") -> Tensor:
        pieces: list[Tensor] = []
        while count > 0 and index > 0:
            index -= 1
            pieces.insert(0, self.dataset[index][side][-count:])
            count -= len(pieces[0])
        return torch.cat(pieces) if pieces else like[:0]

    def collater(self, samples: list[dict]) -> dict:
        """A fairseq batch; ``start_indices`` tells where each row's own tokens begin, ``ntokens`` counts those."""
        batch = self.dataset.collater(samples)
        if samples:
            batch["start_indices"] = [sample["start"] for sample in samples]
            batch["ntokens"] = sum(len(sample["source"]) - sample["start"] for sample in samples)
        return batch

    def __len__(self) -> int:
        return len(self.dataset)

    def num_tokens(self, index: int) -> int:
        """Counts the block without its context, as fairseq does, so ``--max-tokens`` keeps its meaning."""
        return self.dataset.num_tokens(index)

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return self.dataset.num_tokens_vec(indices)

    def size(self, index: int) -> int:
        return self.dataset.size(index)

    def ordered_indices(self) -> np.ndarray:
        return np.concatenate([np.arange(start, stop) for start, stop in self.ranges] or [np.arange(0)])

    def batch_by_size(self, indices: np.ndarray, **kwargs: Any) -> list:
        batches = []
        for start, stop in self.ranges:
            batches.extend(super().batch_by_size(np.arange(start, stop), **kwargs))
        return batches

    @property
    def supports_prefetch(self) -> bool:
        return False  # every backend that is in use maps its file


def own_positions(batch: dict, skip: int = 0) -> Tensor:
    """Mask (B x T) of the positions that a batch is to predict: neither context nor padding.

    Args:
        skip: leave out this many positions at each row's start (the <s> of ``--add-bos-token`` is not in the corpus)
    """
    target = batch["target"]
    positions = torch.arange(target.size(1), device=target.device)
    starts = torch.as_tensor(batch["start_indices"], device=target.device) + skip
    ends = batch["net_input"]["src_lengths"].to(target.device)
    return (positions >= starts[:, None]) & (positions < ends[:, None])
