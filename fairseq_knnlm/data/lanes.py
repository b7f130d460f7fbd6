"""A text in parallel lanes, so that each segment follows the one before it in the same row of the batch."""

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset
from torch import Tensor

from .neighbor_table import NeighborTable
from .parts import contiguous_part


class LaneDataset(FairseqDataset):
    """Lane b reads the b-th of ``lanes`` parts of the text, ``length`` tokens at a time; no token is left out.

    The parts are equal but for one token, so that no lane ends long before the others.
    """

    def __init__(
        self,
        text: str,
        tokens: np.ndarray,
        dictionary: Dictionary,
        lanes: int,
        length: int,
        neighbors: NeighborTable | None = None,
        shards: int = 1,
    ):
        """
        Args:
            text: names the memory that the model keeps of it (a split)
            tokens: (n,) the whole text
            shards: the lanes are dealt out to so many processes
        """
        self.text, self.tokens, self.lanes, self.length, self.shards = text, tokens, lanes, length, shards
        self.dictionary, self.neighbors = dictionary, neighbors
        self.parts = np.array([contiguous_part(len(tokens), lanes, lane) for lane in range(lanes)])  # (lanes, 2)
        self.steps = -(-int(np.diff(self.parts).max()) // length)

    def __len__(self) -> int:
        return self.steps * self.lanes

    def _range(self, index: int) -> tuple[int, int]:
        step, lane = divmod(index, self.lanes)
        begin, end = self.parts[lane].tolist()
        start = min(begin + step * self.length, end)
        return start, min(start + self.length, end)

    def __getitem__(self, index: int) -> dict:
        start, stop = self._range(index)
        target = torch.from_numpy(np.asarray(self.tokens[start:stop], np.int64))
        before = int(self.tokens[start - 1]) if start else self.dictionary.eos()
        source = torch.cat([torch.tensor([before]), target[:-1]]) if len(target) else target
        item = {"id": index, "source": source, "target": target}
        if self.neighbors is not None:
            item["neighbors"] = self.neighbors.tokens(start, stop)
        return item

    def collater(self, samples: list[dict]) -> dict:
        """A fairseq batch: one row a lane, the shorter ones padded on the right."""
        if not samples:
            return {}
        pad, longest = self.dictionary.pad(), max(len(sample["source"]) for sample in samples)

        def stack(name: str, fill: int) -> Tensor:
            rows = [sample[name] for sample in samples]
            result = torch.full((len(rows), longest, *rows[0].shape[1:]), fill)
            for row, values in zip(result, rows):
                row[: len(values)] = values
            return result

        lengths = torch.tensor([len(sample["source"]) for sample in samples])
        net_input = {
            "src_tokens": stack("source", pad),
            "src_lengths": lengths,
            "text": self.text,
            "step": samples[0]["id"] // self.lanes,
        }
        if self.neighbors is not None:
            net_input["neighbors"] = stack("neighbors", -1)
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": int(lengths.sum()),
            "net_input": net_input,
            "target": stack("target", pad),
            "start_indices": [0] * len(samples),
        }

    def batches(self) -> list[list[int]]:
        """Step by step, and in each step the lanes of one process after the other."""
        own = self.lanes // self.shards
        return [list(range(first, first + own)) for first in range(0, len(self), own)]

    def num_tokens(self, index: int) -> int:
        start, stop = self._range(index)
        return stop - start

    def size(self, index: int) -> int:
        return self.num_tokens(index)

    @property
    def sizes(self) -> np.ndarray:
        steps = np.arange(self.steps)[:, None] * self.length
        return (np.diff(self.parts).T - steps).clip(0, self.length).reshape(-1)

    def ordered_indices(self) -> np.ndarray:
        return np.arange(len(self))

    @property
    def supports_prefetch(self) -> bool:
        return False
