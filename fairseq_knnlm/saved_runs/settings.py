"""One setting of all knobs of a saved run, and the result it gives."""

import math
from dataclasses import dataclass, replace

import numpy as np

from ..errors import KnnlmError
from ..memory import MemoryFacts
from ..mixture.interpolation import perplexity
from .scores import SavedMemoryScores, SavedScores
from .weights import best_weights, mixture_log_probs


@dataclass(frozen=True)
class Settings:
    """The values of the flags. ``k`` is None where every visited entry takes part, or there is no datastore."""

    weights: tuple[float, ...]  # lambda of each memory: datastores, heads, the cache
    k: int | None = None
    temperatures: tuple[float, ...] = ()  # of each datastore
    cache_size: int | None = None
    theta: float = 0.0

    @classmethod
    def of_run(cls, saved: SavedScores) -> "Settings":
        """What the saved run itself used."""
        knn, cache = saved.knn_memories, saved.cache
        return cls(
            weights=tuple(memory.weight for memory in saved.run.memories),
            k=max((memory.neighbors for memory in knn if memory.neighbors), default=None),
            temperatures=tuple(1 / memory.sharpness for memory in knn),
            cache_size=cache.neighbors if cache else None,
            theta=cache.sharpness if cache else 0.0,
        )

    def at_temperature(self, value: float) -> "Settings":
        """The same with one temperature for every datastore."""
        return replace(self, temperatures=(value,) * len(self.temperatures))

    def rounded(self) -> "Settings":
        """To the digits that are printed, so that what is printed gives what is promised."""
        return replace(
            self,
            weights=tuple(math.floor(weight * 1e4) / 1e4 for weight in self.weights),  # never above 1 in sum
            temperatures=tuple(float(f"{temperature:.4g}") for temperature in self.temperatures),
            theta=float(f"{self.theta:.4g}"),
        )

    def flags(self, saved: SavedScores) -> str:
        """As fairseq-eval-lm takes them."""
        knn = len(saved.knn_memories)
        parts = []
        if knn:
            temperatures = self.temperatures if len(set(self.temperatures)) > 1 else self.temperatures[:1]
            parts += [f"--knn-k {self.k or 'all'}", f"--knn-lambda {_joined(self.weights[:knn])}"]
            parts += [f"--knn-temperature {_joined(temperatures)}"]
        if saved.heads:
            parts += [f"--knn-head-lambda {_joined(self.weights[knn : knn + len(saved.heads)])}"]
        if saved.cache:
            parts += [f"--knn-cache-size {self.cache_size}", f"--knn-cache-lambda {self.weights[-1]:g}"]
            parts += [f"--knn-cache-theta {self.theta:g}"]
        return " ".join(parts)


def _joined(numbers: tuple[float, ...]) -> str:
    return ",".join(f"{number:g}" for number in numbers)


@dataclass(frozen=True)
class Result:
    """What every line of every table carries."""

    tokens: int
    lm: float  # perplexities
    mixture: float
    oracle: float  # per token the best of LM and memories
    hit_rate: float | None  # share of the tokens that the datastores hold among the neighbours
    effective_neighbors: float | None  # exponential of the mean entropy of the neighbours' shares
    words: float | None = None  # of the text, where its data tells
    lm_per_word: float | None = None
    mixture_per_word: float | None = None

    HEADER = ("LM", "mixture", "oracle", "hit rate", "effective neighbours")

    def cells(self) -> list[str]:
        hits = "-" if self.hit_rate is None else f"{self.hit_rate:.4f}"
        effective = "-" if self.effective_neighbors is None else f"{self.effective_neighbors:.1f}"
        return [f"{self.lm:.2f}", f"{self.mixture:.2f}", f"{self.oracle:.2f}", hits, effective]


def memory_scores(saved: SavedScores, settings: Settings, with_entropy: bool = False) -> list[SavedMemoryScores]:
    """Each memory of the run at the chosen knobs, the cache last."""
    scores = []
    for number, memory in enumerate(saved.run.memories):
        limit, sharpness = _limit_and_sharpness(settings, number, memory)
        if memory.neighbors is not None and limit is not None:
            if limit > memory.neighbors and memory.identity.get("entries") != memory.neighbors:
                flag = "--knn-cache-size" if memory.is_cache else "--knn-k"
                raise KnnlmError(
                    f"{limit} neighbours are wanted but {memory.neighbors} were saved; score again with "
                    f"{flag} {limit} --knn-save"
                )
            limit = min(limit, memory.neighbors)
        scores.append(saved.scores(memory.name, limit, sharpness, with_entropy and not memory.is_cache))
    return scores


def _limit_and_sharpness(settings: Settings, number: int, memory: MemoryFacts) -> tuple[int | None, float]:
    """How many neighbours of a memory count, and how sharply; a head has none, and its own temperature."""
    if memory.is_head:
        return None, memory.sharpness
    if memory.is_cache:
        return settings.cache_size, settings.theta
    return settings.k, 1 / settings.temperatures[number]


def stack(saved: SavedScores, scores: list[SavedMemoryScores]) -> np.ndarray:
    """Log-probabilities of the LM and of each memory, (1 + memories, n)."""
    return np.stack([saved.lm, *(memory.log_probs for memory in scores)])


def with_best_weights(saved: SavedScores, settings: Settings) -> Settings:
    weights = best_weights(stack(saved, memory_scores(saved, settings)))
    return replace(settings, weights=tuple(float(weight) for weight in weights[1:]))


def evaluate(saved: SavedScores, settings: Settings) -> Result:
    scores = memory_scores(saved, settings, with_entropy=True)
    log_probs = stack(saved, scores)
    mixture = mixture_log_probs(log_probs, np.array([1 - sum(settings.weights), *settings.weights]))
    knn = scores[: len(saved.knn_memories)]
    entropies = [memory.entropy for memory in knn if memory.entropy is not None]
    words = saved.words
    per_word = {"words": words, "lm_per_word": perplexity(float(saved.lm.sum()) / words),
                "mixture_per_word": perplexity(float(mixture.sum()) / words)} if words else {}  # fmt: skip
    return Result(
        **per_word,
        tokens=len(saved),
        lm=perplexity(float(saved.lm.mean())),
        mixture=perplexity(float(mixture.mean())),
        oracle=perplexity(float(log_probs.max(axis=0).mean())),
        hit_rate=float(np.mean(np.any([memory.hits for memory in knn], axis=0))) if knn else None,
        effective_neighbors=float(np.exp(np.mean(entropies))) if entropies else None,
    )
