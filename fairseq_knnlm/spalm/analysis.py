"""What a trained SPALM does with its memory: gates, the number of neighbours, and where it predicts better."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from fairseq import checkpoint_utils
from torch import Tensor

from ..errors import KnnlmError
from ..mixture.interpolation import perplexity
from ..mixture.scoring import lm_target_log_probs
from ..models.spalm_lm import SPALMDecoder
from ..models.transformer_xl import TransformerXLDecoder
from ..progress import progress
from ..saved_runs.format import SavePart
from ..tasks.spalm import SPALMTask, SPALMTaskConfig

HISTOGRAM_BINS = 50


@dataclass
class Segment:
    """Some consecutive tokens of a split as SPALM reads them."""

    targets: Tensor  # (n,)
    states: Tensor  # (1, n, C), h: what memory and gate start from
    neighbors: Tensor  # (1, n, K) all retrieved tokens of the table


class SplitReader:
    """A SPALM checkpoint and a split with its neighbours, read in one lane as fairseq-eval-lm does."""

    def __init__(self, path: str, data: str, neighbors: str, split: str, segment: int, memory_size: int | None):
        config = SPALMTaskConfig(data=data, neighbors=neighbors, tokens_per_sample=segment, dataset_impl=None)
        if not Path(path).is_file():
            raise KnnlmError(f"there is no checkpoint {path}; give a file that fairseq-train wrote")
        try:
            self.task = SPALMTask.setup_task(config)
        except (OSError, RuntimeError) as error:
            raise KnnlmError(f"{data} has no readable dict.txt ({error}); give the binarised data's folder") from error
        overrides = {} if memory_size is None else {"memory_size": memory_size}
        (model,), _ = checkpoint_utils.load_model_ensemble([path], overrides, self.task)
        self.decoder = model.eval().decoder
        if not isinstance(self.decoder, SPALMDecoder) or not self.decoder.neighbors_used:
            raise KnnlmError(f"{path} is no SPALM that reads neighbours; give a checkpoint of spalm_lm")
        self.task.load_dataset(split)
        self.dataset, self.segment = self.task.datasets[split], segment

    def __len__(self) -> int:
        return len(self.dataset.tokens)

    @property
    def k(self) -> int:
        """Neighbours that the table has."""
        return self.dataset.neighbors.k

    @torch.no_grad()
    def read(self, start: int, stop: int) -> Iterator[Segment]:
        """The tokens [start, stop), after as much of the text before them as the memory can hold."""
        first, last = start // self.segment, -(-stop // self.segment)
        warm_up = max(0, first - -(-self.decoder.reach(self.segment) // self.segment))
        with progress("reading", stop - start, " tokens") as bar:
            for number in range(warm_up, last):
                batch = self.dataset.collater([self.dataset[number]])
                inputs = batch["net_input"]
                states = TransformerXLDecoder.extract_features(
                    self.decoder, inputs["src_tokens"], inputs["text"], inputs["step"]
                )
                if number < first:
                    continue
                begin = number * self.segment
                own = slice(max(start - begin, 0), min(stop - begin, self.segment))
                targets = batch["target"][0, own]
                yield Segment(targets, states[:, own], inputs["neighbors"][:, own])
                bar.update(len(targets))


@dataclass
class Gates:
    """The gate over some tokens; 1 is the network's own state, 0 the retrieved tokens."""

    tokens: np.ndarray  # (n,)
    means: np.ndarray  # (n,) over the dimensions
    counts: np.ndarray  # (bins,) of all values, n * C of them
    values: np.ndarray  # (C or 1, m) of the first m tokens

    @property
    def edges(self) -> np.ndarray:
        return np.linspace(0, 1, len(self.counts) + 1)


def read_gates(reader: SplitReader, start: int, stop: int, shown: int) -> Gates:
    """Gates of the tokens [start, stop), each value for the first ``shown``."""
    tokens, means, counts = [], [], np.zeros(HISTOGRAM_BINS, np.int64)
    kept: list[np.ndarray] = []
    for segment in reader.read(start, stop):
        with torch.no_grad():
            gate = reader.decoder.gate_values(segment.states)[0].float().numpy()  # (n, C)
        tokens.append(segment.targets.numpy())
        means.append(gate.mean(axis=1))
        counts += np.histogram(gate, HISTOGRAM_BINS, (0, 1))[0]
        if sum(map(len, kept)) < shown:
            kept.append(gate)
    return Gates(np.concatenate(tokens), np.concatenate(means), counts, np.concatenate(kept)[:shown].T)


def perplexity_by_k(reader: SplitReader, start: int, stop: int, numbers: list[int]) -> dict[int, float]:
    """Perplexity of the tokens [start, stop) when the network reads so many of the neighbours.

    The states do not depend on the neighbours, so one pass serves every K.
    """
    above = [k for k in numbers if not 1 <= k <= reader.k]
    if above:
        raise KnnlmError(
            f"the table has {reader.k} neighbours per token, so K cannot be {above[0]}; use 1 to {reader.k}, or run "
            "knnlm neighbors with a larger --k"
        )
    sums, tokens = dict.fromkeys(numbers, 0.0), 0
    for segment in reader.read(start, stop):
        tokens += len(segment.targets)
        for k in numbers:
            with torch.no_grad():
                mixed = reader.decoder.mix(segment.states, segment.neighbors[:, :, :k])[0]
                sums[k] += lm_target_log_probs(reader.decoder, mixed, segment.targets).double().sum().item()
    return {k: perplexity(total / tokens) for k, total in sums.items()}


@dataclass
class Gains:
    """Where one model gives the target a probability that is higher than every other model's, or lower, by a margin."""

    tokens: np.ndarray  # (n,) the whole text
    probabilities: np.ndarray  # (models, n), the one that is looked at first
    better: np.ndarray  # indices of tokens, largest gain first
    worse: np.ndarray


def find_gains(folders: list[str], margin: float) -> Gains:
    """Compare saves of the same tokens (fairseq-eval-lm --knn-save)."""
    saves = [SavePart.open(folder) for folder in folders]
    tokens = np.asarray(saves[0].arrays["tokens"])
    for save in saves[1:]:
        same_place = (save.run.start, save.run.stop) == (saves[0].run.start, saves[0].run.stop)
        if not same_place or not np.array_equal(save.arrays["tokens"], tokens):
            raise KnnlmError(
                f"{saves[0].folder} and {save.folder} hold different tokens; score the same part of the same split"
            )
    probabilities = np.exp(np.stack([save.arrays["lm"] for save in saves]))
    ahead = probabilities[0] - probabilities[1:].max(axis=0)
    behind = probabilities[1:].min(axis=0) - probabilities[0]

    def beyond(difference: np.ndarray) -> np.ndarray:
        found = np.flatnonzero(difference > margin)
        return found[np.argsort(-difference[found], kind="stable")]

    return Gains(tokens, probabilities, beyond(ahead), beyond(behind))
