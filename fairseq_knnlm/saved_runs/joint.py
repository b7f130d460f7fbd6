"""Several saves of one text as one mixture: the LMs and the memories of all of them, with the best constant weights."""

from dataclasses import dataclass

import numpy as np

from ..errors import KnnlmError
from ..mixture.interpolation import perplexity
from .scores import SavedScores
from .settings import Settings, memory_scores, stack
from .tuning import check_not_test, check_report, tune
from .weights import best_weights, mixture_log_probs


@dataclass(frozen=True)
class JointResult:
    """Perplexities of one text."""

    tokens: int
    alone: list[float]  # of each save's LM
    average: float  # of the mean of the LMs' probabilities: what --path a.pt:b.pt gives without a memory
    mixture: float  # of everything, with the weights that were found
    oracle: float  # per token the best of all parts


class JointSaves:
    """Saves of the same tokens, scored by different models or with different memories."""

    def __init__(self, saves: list[str]):
        """saves: a folder each, or the --num-shards parts of one run joined by commas"""
        if len(saves) < 2:
            raise KnnlmError("a mixture of saves needs two or more; for one save there is knnlm tune")
        self.names, self.saves = saves, [SavedScores.open(save.split(",")) for save in saves]
        first = self.saves[0]
        for name, other in zip(saves[1:], self.saves[1:]):
            dictionaries = {save.run.source.get("dictionary_sha256") for save in (first, other)}
            if len(dictionaries) > 1:
                raise KnnlmError(f"{saves[0]} and {name} have different dictionaries; give saves of the same data")
            if not np.array_equal(first.tokens, other.tokens):
                raise KnnlmError(
                    f"{saves[0]} and {name} are of different tokens ({len(first):,} and {len(other):,}); score the "
                    "same part of the same split with both"
                )

    def __len__(self) -> int:
        return len(self.saves[0])

    @property
    def labels(self) -> list[str]:
        """Of each part of the mixture."""
        pairs = zip(self.names, self.saves)
        return [f"{part} of {name}" for name, save in pairs for part in ("LM", *(m.name for m in save.run.memories))]

    def tuned(self) -> list[Settings]:
        """For each save the best k, temperature and theta of its memories beside its own LM (not the weights)."""
        for save in self.saves:
            check_not_test(save)
        return [tune(save) if save.run.memories else Settings.of_run(save) for save in self.saves]

    def log_probs(self, settings: list[Settings]) -> np.ndarray:
        """Of every part: (parts, n)."""
        pairs = zip(self.saves, settings)
        return np.concatenate([stack(save, memory_scores(save, setting)) for save, setting in pairs])

    def evaluate(self, log_probs: np.ndarray, weights: np.ndarray) -> JointResult:
        """log_probs (parts, n), weights (parts,)."""
        lms = np.stack([save.lm for save in self.saves])
        average = mixture_log_probs(lms, np.full(len(lms), 1 / len(lms)))
        return JointResult(
            tokens=len(self),
            alone=[perplexity(float(lm.mean())) for lm in lms],
            average=perplexity(float(average.mean())),
            mixture=perplexity(float(mixture_log_probs(log_probs, weights).mean())),
            oracle=perplexity(float(log_probs.max(axis=0).mean())),
        )


def check_joint_report(tuned: JointSaves, report: JointSaves) -> None:
    """The text to report must be another one, scored by the same models with the same memories in the same order."""
    if len(tuned.saves) != len(report.saves):
        raise KnnlmError(f"--report needs as many saves as are mixed, {len(tuned.saves)}, in the same order")
    for ours, theirs in zip(tuned.saves, report.saves):
        check_report(ours, theirs)


def mix(saves: JointSaves, report: JointSaves | None = None) -> tuple[np.ndarray, list[JointResult]]:
    """The best weights (parts,), and what they give for the saves and for those to report."""
    if report is not None:
        check_joint_report(saves, report)
    settings = saves.tuned()
    log_probs = saves.log_probs(settings)
    weights = best_weights(log_probs)
    results = [saves.evaluate(log_probs, weights)]
    if report is not None:
        results.append(report.evaluate(report.log_probs(settings), weights))
    return weights, results
