"""Soft labels of a training text: for each of its tokens a distribution over what could have come in its place.

They are the LM's own (a save with ``--knn-save-top K``: its K most probable tokens, and how much mass the others have),
those of the nearest neighbours (a table of ``knnlm neighbors``, in which no token finds itself), or a mixture of both.
Row i belongs to the i-th token of the text, in corpus order. fairseq shuffles blocks, so each block brings the rows of
its own position, and every row is compared with the text before training starts.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.data import BaseWrapperDataset, MonolingualDataset
from torch import Tensor

from ..data.neighbor_table import NeighborTable
from ..errors import KnnlmError
from ..index.temperature import temperature_of_neighbors
from ..memory.probabilities import neighbor_log_weights, similarities
from ..saved_runs.format import SavePart, open_save

SAMPLE_ROWS = 4096  # of a table of neighbours, that tell the scale of its distances
SCORE_TRAIN = "score all of train with fairseq-eval-lm --gen-subset train --knn-save DIR --knn-save-top 32"


class LabelRows(NamedTuple):
    """The labels of n tokens. Their cross-entropy is a sum, so a token may be listed twice."""

    tokens: Tensor  # (n, k)
    probs: Tensor  # (n, k) float32
    rest: Tensor  # (n,) mass of the tokens that the LM's part, the first columns, does not list


class SavedLabels:
    """The most probable tokens of an LM, from the parts of a save of a whole split."""

    def __init__(self, folders: list[str]):
        self.parts: list[SavePart] = open_save(folders)
        run, self.name = self.parts[0].run, folders[0]
        if not run.top:
            raise KnnlmError(f"{self.name} holds no most probable tokens; {SCORE_TRAIN}")
        scored = sum(part.run.tokens for part in self.parts)
        if scored != run.split_tokens:
            raise KnnlmError(
                f"{self.name} holds {scored:,} of the {run.split_tokens:,} tokens of {run.source['split']}; give every "
                f"part of it, or {SCORE_TRAIN}"
            )
        self.k, self.source, self.tokens = run.top, run.source, scored

    def check_text(self, text: np.ndarray) -> None:
        """Refuse rows that do not belong to these tokens (n,), one for one."""
        wrong = np.flatnonzero(self._read("tokens", 0, self.tokens) != text)
        if len(wrong):
            raise KnnlmError(
                f"{self.name} does not fit the text: row {wrong[0]:,} belongs to another token; {SCORE_TRAIN} again"
            )

    def _read(self, name: str, start: int, stop: int) -> np.ndarray:
        rows = []
        for part in self.parts:
            first, last = max(start, part.run.start), min(stop, part.run.stop)
            if first < last:
                rows.append(part.arrays[name][first - part.run.start : last - part.run.start])
        return np.concatenate(rows)

    def rows(self, start: int, stop: int) -> LabelRows:
        tokens = torch.from_numpy(self._read("top.tokens", start, stop).astype(np.int64))
        probs = torch.from_numpy(self._read("top.probs", start, stop).astype(np.float32))
        return LabelRows(tokens, probs, (1 - probs.sum(dim=1)).clamp(min=0))


class NeighborLabels:
    """The retrieved tokens of a table of neighbours, with the shares of p_kNN."""

    def __init__(self, folder: str, temperature: float | None):
        self.table, self.name = NeighborTable(folder), folder
        self.source, self.tokens, self.k = self.table.facts.queries, len(self.table), self.table.k
        self.temperature = temperature or self._measured()

    def _measured(self) -> float:
        found = temperature_of_neighbors(self._similarities(0, SAMPLE_ROWS).double())
        if found is None:
            raise KnnlmError(f"the neighbours of {self.name} are too few to measure; give --soft-temperature")
        return found

    def _similarities(self, start: int, stop: int) -> Tensor:
        distances, ids = self.table.distances(start, stop), self.table.ids(start, stop)
        metric = str(self.table.facts.search.get("metric", "l2"))
        return similarities(torch.from_numpy(distances), torch.from_numpy(ids), metric)

    def check_text(self, text: np.ndarray) -> None:
        self.table.check_text(text)

    def rows(self, start: int, stop: int) -> LabelRows:
        found = self.table.log_weights(start, stop)
        log_weights = None if found is None else torch.from_numpy(found)
        shares = neighbor_log_weights(self._similarities(start, stop), 1 / self.temperature, log_weights).exp()
        return LabelRows(self.table.tokens(start, stop).clamp(min=0), shares, torch.zeros(len(shares)))


class SoftLabels:
    """The labels of a split, from one source or from both."""

    def __init__(self, lm: SavedLabels | None, neighbors: NeighborLabels | None, weight: float):
        """weight: lambda, the neighbours' share of the mixture, if there are both"""
        both = [(lm, 1 - weight if neighbors else 1.0), (neighbors, weight if lm else 1.0)]
        self.sources = [(source, share) for source, share in both if source is not None]
        self.lm_columns = lm.k if lm else 0  # that the rest is the rest of
        splits = {str(source.source.get("split")) for source, _ in self.sources}
        if len(splits) > 1:
            raise KnnlmError(f"the soft labels are of different splits ({', '.join(sorted(splits))}); make both of one")
        (self.split,) = splits

    def check(self, text: np.ndarray, facts: dict[str, Any]) -> None:
        """Refuse labels of another text or dictionary. text: (n,); facts: of it, as a save's source has them."""
        for source, _ in self.sources:
            if source.source.get("dictionary_sha256") != facts["dictionary_sha256"]:
                raise KnnlmError(f"{source.name} was made with another dictionary; make it again for this data")
            if source.tokens != len(text):
                raise KnnlmError(
                    f"{source.name} is of another text ({source.tokens:,} tokens, here {len(text):,}); make it again "
                    "for this data"
                )
            source.check_text(text)

    def rows(self, start: int, stop: int) -> LabelRows:
        """Of the tokens [start, stop) of the text."""
        parts = [(source.rows(start, stop), share) for source, share in self.sources]
        return LabelRows(
            torch.cat([rows.tokens for rows, _ in parts], dim=1),
            torch.cat([rows.probs * share for rows, share in parts], dim=1),
            torch.stack([rows.rest * share for rows, share in parts]).sum(dim=0),
        )


class LabelledBlocks(BaseWrapperDataset):
    """Blocks of a text, each with the labels of its own tokens."""

    def __init__(self, dataset: MonolingualDataset, labels: SoftLabels, facts: dict[str, Any]):
        super().__init__(dataset)
        if dataset.add_bos_token or dataset.targets != ["future"]:
            raise KnnlmError("soft labels are of next tokens; leave out --add-bos-token, --self-target, --past-target")
        lines = dataset.dataset.dataset  # what the blocks are cut from
        labels.check(np.concatenate([lines[number].numpy() for number in range(len(lines))]), facts)
        self.labels, self._ranges = labels, dataset.dataset.slice_indices  # (blocks, 2): positions in the text

    def __getitem__(self, index: int) -> dict:
        start, stop = self._ranges[index].tolist()
        return {**self.dataset[index], "labels": self.labels.rows(start, stop)}

    def collater(self, samples: list[dict]) -> dict:
        """A fairseq batch; the labels are those of its targets that are no padding, row after row."""
        batch = self.dataset.collater(samples)
        if samples:
            columns = zip(*(sample["labels"] for sample in samples))
            batch["soft_labels"] = dict(zip(LabelRows._fields, map(torch.cat, columns)))
        return batch


def open_labels(
    saves: str | None, neighbors: str | None, weight: float | None, temperature: float | None
) -> SoftLabels:
    """What ``--soft-labels``, ``--soft-neighbors``, ``--soft-lambda`` and ``--soft-temperature`` ask for."""
    if not saves and not neighbors:
        raise KnnlmError("--criterion soft_labels needs labels; give --soft-labels SAVE, --soft-neighbors DIR, or both")
    if weight is not None and not (saves and neighbors):
        raise KnnlmError("--soft-lambda mixes --soft-labels and --soft-neighbors; give both, or leave it out")
    if temperature is not None and not neighbors:
        raise KnnlmError("--soft-temperature is for --soft-neighbors; add it, or leave this out")
    if weight is not None and not 0 <= weight <= 1:
        raise KnnlmError(f"--soft-lambda must be between 0 and 1, not {weight:g}")
    if temperature is not None and not temperature > 0:
        raise KnnlmError(f"--soft-temperature must be above 0, not {temperature:g}")
    lm = SavedLabels(saves.split(",")) if saves else None
    near = NeighborLabels(str(Path(neighbors)), temperature) if neighbors else None
    return SoftLabels(lm, near, 0.25 if weight is None else weight)
