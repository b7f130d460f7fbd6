"""One setting of all knobs of a saved run, and the result it gives."""

import math
from dataclasses import dataclass, replace

import numpy as np

from ..errors import KnnlmError
from .evidence import Evidence, MemoryScores
from .weights import best_weights, mixture_log_probs


@dataclass(frozen=True)
class Choice:
    """The values of the flags. ``k`` is None where every visited entry takes part, or there is no datastore."""

    weights: tuple[float, ...]  # lambda of each memory, the cache last
    k: int | None = None
    temperature: float = 1.0
    cache_size: int | None = None
    theta: float = 0.0

    @classmethod
    def of_run(cls, evidence: Evidence) -> "Choice":
        """What the saved run itself used."""
        knn, cache = evidence.knn_memories, evidence.cache
        return cls(
            weights=tuple(memory.weight for memory in evidence.run.memories),
            k=max((memory.neighbors for memory in knn if memory.neighbors), default=None),
            temperature=1 / knn[0].sharpness if knn else 1.0,
            cache_size=cache.neighbors if cache else None,
            theta=cache.sharpness if cache else 0.0,
        )

    def rounded(self) -> "Choice":
        """To the digits that are printed, so that what is printed gives what is promised."""
        return replace(
            self,
            weights=tuple(math.floor(weight * 1e4) / 1e4 for weight in self.weights),  # never above 1 in sum
            temperature=float(f"{self.temperature:.4g}"),
            theta=float(f"{self.theta:.4g}"),
        )

    def flags(self, evidence: Evidence) -> str:
        """As fairseq-eval-lm takes them."""
        knn = len(evidence.knn_memories)
        parts = []
        if knn:
            weights = ",".join(f"{weight:g}" for weight in self.weights[:knn])
            parts += [f"--knn-k {self.k or 'all'}", f"--knn-lambda {weights}"]
            parts += [f"--knn-temperature {self.temperature:g}"]
        if evidence.cache:
            parts += [f"--knn-cache-size {self.cache_size}", f"--knn-cache-lambda {self.weights[-1]:g}"]
            parts += [f"--knn-cache-theta {self.theta:g}"]
        return " ".join(parts)


@dataclass(frozen=True)
class Result:
    """What every line of every table carries."""

    tokens: int
    lm: float  # perplexities
    mixture: float
    oracle: float  # per token the best of LM and memories
    hit_rate: float | None  # share of the tokens that the datastores hold among the neighbours
    effective_neighbors: float | None  # exponential of the mean entropy of the neighbours' shares

    HEADER = ("LM", "mixture", "oracle", "hit rate", "effective neighbours")

    def cells(self) -> list[str]:
        hits = "-" if self.hit_rate is None else f"{self.hit_rate:.4f}"
        effective = "-" if self.effective_neighbors is None else f"{self.effective_neighbors:.1f}"
        return [f"{self.lm:.2f}", f"{self.mixture:.2f}", f"{self.oracle:.2f}", hits, effective]


def memory_scores(evidence: Evidence, choice: Choice, with_entropy: bool = False) -> list[MemoryScores]:
    """Each memory of the run at the chosen knobs, the cache last."""
    scores = []
    for memory in evidence.run.memories:
        limit, sharpness = (
            (choice.cache_size, choice.theta) if memory.is_cache else (choice.k, 1 / choice.temperature)
        )
        if memory.neighbors is not None and limit is not None:
            if limit > memory.neighbors and memory.identity.get("entries") != memory.neighbors:
                flag = "--knn-cache-size" if memory.is_cache else "--knn-k"
                raise KnnlmError(
                    f"{limit} neighbours are wanted but {memory.neighbors} were saved; score again with "
                    f"{flag} {limit} --knn-save"
                )
            limit = min(limit, memory.neighbors)
        scores.append(evidence.scores(memory.name, limit, sharpness, with_entropy and not memory.is_cache))
    return scores


def stack(evidence: Evidence, scores: list[MemoryScores]) -> np.ndarray:
    """Log-probabilities of the LM and of each memory, (1 + memories, n)."""
    return np.stack([evidence.lm, *(memory.log_probs for memory in scores)])


def with_best_weights(evidence: Evidence, choice: Choice) -> Choice:
    weights = best_weights(stack(evidence, memory_scores(evidence, choice)))
    return replace(choice, weights=tuple(float(weight) for weight in weights[1:]))


def evaluate(evidence: Evidence, choice: Choice) -> Result:
    scores = memory_scores(evidence, choice, with_entropy=True)
    log_probs = stack(evidence, scores)
    mixture = mixture_log_probs(log_probs, np.array([1 - sum(choice.weights), *choice.weights]))
    knn = scores[: len(evidence.knn_memories)]
    saved = [memory for memory in knn if memory.entropy is not None]
    return Result(
        tokens=len(evidence),
        lm=_perplexity(evidence.lm),
        mixture=_perplexity(mixture),
        oracle=_perplexity(log_probs.max(axis=0)),
        hit_rate=float(np.mean(np.any([memory.hits for memory in knn], axis=0))) if knn else None,
        effective_neighbors=float(np.exp(np.mean([memory.entropy for memory in saved]))) if saved else None,
    )


def _perplexity(log_probs: np.ndarray) -> float:
    return float(np.exp(min(-log_probs.mean(), 700.0)))
