"""A part of a text that is read in several lanes at once by a model with a memory, with the result of one lane.

A lane begins to read so far before what it is to predict that the states of the model are those of a reader that came
from the beginning. Results come lane by lane; ``in_corpus_order`` puts them back in order.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .context_blocks import own_positions
from .lanes import LaneDataset
from .parts import Range

Lane = tuple[int, int, int]  # it reads segments from the first number on, predicts from the second, up to the third
WORTH_IT = 4  # a lane predicts at least so many times what it only reads, where there are more lanes than groups
MOST_TOKENS = 1 << 18  # read before results are put in order; more of them need less warming up, and more memory


def plan_lanes(first: int, last: int, most_lanes: int, warm_up: int) -> list[Lane]:
    """Lanes that predict the segments [first, last) together, each after ``warm_up`` segments that it only reads.

    All of them read equally many segments, but for the last. Example: 0 to 10 in 2 lanes with a warm-up of 2 are
    (0, 0, 6) and (4, 6, 10): the beginning of the text needs no warm-up.
    """
    count = last - first
    lanes = max(1, min(most_lanes, count // max(1, warm_up)))  # at most twice the work
    steps = -(-count // lanes)
    while True:
        parts: list[Lane] = []
        start = first
        while start < last and len(parts) < lanes:
            begin = max(0, start - warm_up)
            stop = min(last, begin + steps)
            if stop <= start:
                break
            parts.append((begin, start, stop))
            start = stop
        if start == last:
            return parts
        steps += 1


class LaneGroups:
    """Ranges of the segments of a text as samples for the scorer or for a dump; see ``GroupedBatches``.

    A batch is one step of every lane of a group of lanes. The segments that a lane only reads predict nothing. Groups
    have a memory each, by the name of their text, so that they can go through the model at the same time.
    """

    def __init__(
        self, dataset: LaneDataset, ranges: Sequence[Range], lanes: int, reach: int, tokens_at_once: int = 0,
        groups: int = 1,
    ):  # fmt: skip
        """
        Args:
            dataset: the text in one lane
            ranges: of segments that are to be predicted, ascending
            lanes: at most
            reach: how many tokens back states depend on
            tokens_at_once: of a sample at least, where there are so many
            groups: of lanes, at most: how many threads run the model
        """
        self._dataset, self._lanes, self._groups = dataset, lanes, groups
        self._warm_up = -(-reach // dataset.length)
        most = max(1, max(tokens_at_once, MOST_TOKENS) // dataset.length)
        self._parts = [
            (start + (stop - start) * part // parts, start + (stop - start) * (part + 1) // parts)
            for start, stop in ranges
            for parts in [-(-(stop - start) // most)]
            for part in range(parts)
        ]

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[dict]:
        for first, last in self._parts:
            batches = list(self._batches(first, last))
            sizes = self._dataset.sizes[first:last]
            yield {
                "batches": batches,
                "warm_up": [],
                "id": torch.arange(first, last),
                "ntokens": int(sizes.sum()),
                "net_input": batches[0]["net_input"],
            }

    def _batches(self, first: int, last: int) -> Iterator[dict]:
        worth_it = max(self._groups, (last - first) // max(1, WORTH_IT * self._warm_up))
        lanes = plan_lanes(first, last, min(self._lanes, worth_it), self._warm_up)
        for group in range(min(self._groups, len(lanes))):
            yield from self._steps(lanes[group :: self._groups], f"{self._dataset.text}, lanes {group}")

    def _steps(self, lanes: list[Lane], text: str) -> Iterator[dict]:
        """A batch for each step of some lanes. text: the name of their memory"""
        for step in range(max(stop - begin for begin, _, stop in lanes)):
            # A lane that has ended goes on with nothing: the segment behind the last one is empty.
            segments = [begin + step if begin + step < stop else len(self._dataset) for begin, _, stop in lanes]
            batch = self._dataset.collater([self._dataset[segment] for segment in segments])
            batch["net_input"] |= {"step": step, "text": text}
            lengths = batch["net_input"]["src_lengths"].tolist()
            batch["start_indices"] = [
                0 if segment >= start else length
                for segment, (_, start, _), length in zip(segments, lanes, lengths)
            ]  # fmt: skip
            batch["in_lanes"] = True
            yield batch


def in_lanes(batches: list[dict]) -> bool:
    """Whether the results of these batches have to be put in order."""
    return bool(batches) and batches[0].get("in_lanes", False)


def corpus_order(batches: list[dict], skip: int = 0) -> Tensor:
    """Where the predicted tokens of batches in lanes stand among all of them, in corpus order: (n,)."""
    segments = []
    for batch in batches:
        own = own_positions(batch, skip)
        segments.append(batch["id"].to(own.device)[:, None].expand_as(own)[own])
    return torch.argsort(torch.cat(segments), stable=True)


def rows_in_order(batches: list[dict]) -> list[Tensor]:
    """The predicted tokens of each segment, in corpus order."""
    rows = []
    for batch in batches:
        for segment, target, own in zip(batch["id"].tolist(), batch["target"], own_positions(batch)):
            if own.any():
                rows.append((segment, target[own]))
    return [tokens for _, tokens in sorted(rows, key=lambda row: row[0])]
