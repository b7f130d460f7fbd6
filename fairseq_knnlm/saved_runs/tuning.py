"""The best lambda, temperature, k, cache lambda and theta for a saved run."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..errors import KnnlmError
from .scores import SavedScores
from .settings import Settings, memory_scores, stack, with_best_weights
from .weights import best_weights, mixture_log_probs

SAMPLE = 20_000  # tokens that the coarse search looks at
DOUBLINGS = range(-7, 8)  # of the sharpness, around one over the typical gap between neighbours
ROUNDS = 2  # the datastores' knobs, then the cache's, then again


class Tally:
    """Losses of settings, each with its best weights, and how many of them were looked at."""

    def __init__(self) -> None:
        self.settings = 0

    def loss(self, log_probs: np.ndarray, tolerance: float = 1e-7) -> float:
        """Mean loss of the mixture of log_probs (1 + memories, n)."""
        self.settings += 1
        return -float(mixture_log_probs(log_probs, best_weights(log_probs, tolerance)).mean())


def tune(saved: SavedScores, tally: Tally | None = None) -> Settings:
    """A coarse grid on a sample, then a golden-section search on all tokens, each with its best weights.

    Given the other knobs, the best weights are found exactly; in temperature and theta the likelihood has one maximum
    for all we have seen, but that is no theorem, hence the grid.
    """
    sample, settings = saved.sample(SAMPLE), Settings.of_run(saved)
    tally = tally or Tally()
    groups = _groups(saved)
    for _ in range(ROUNDS if len(groups) > 1 else 1):
        for group in groups:
            settings = _best_on_grid(sample, settings, group, tally)
    for group in groups:
        for number in _members(saved, group):
            settings = _refine(saved, settings, number, tally)
    fixed = [number for number, memory in enumerate(saved.run.memories) if memory.temperatures and not memory.is_head]
    for _ in range(ROUNDS if len(fixed) > 1 else 1):
        for number in fixed:
            settings = _best_saved_temperature(saved, settings, number, tally)
    return with_best_weights(saved, settings).rounded()


def _groups(saved: SavedScores) -> list[str]:
    """Whose neighbours are saved, so that counts and sharpness can be chosen freely: knn, cache."""
    groups = ["knn"] if any(memory.neighbors for memory in saved.knn_memories) else []
    return groups + (["cache"] if saved.cache else [])


def _members(saved: SavedScores, group: str) -> list[int]:
    """The memories of a group whose neighbours are saved."""
    memories = enumerate(saved.run.memories)
    return [number for number, m in memories if m.neighbors is not None and m.is_cache == (group == "cache")]


def _with_sharpness(saved: SavedScores, settings: Settings, number: int, sharpness: float) -> Settings:
    """One memory at another temperature or theta."""
    if saved.run.memories[number].is_cache:
        return replace(settings, theta=sharpness)
    temperatures = list(settings.temperatures)
    temperatures[number] = 1 / sharpness
    return replace(settings, temperatures=tuple(temperatures))


def _best_on_grid(sample: SavedScores, settings: Settings, group: str, tally: Tally) -> Settings:
    """All counts (powers of two) and sharpnesses of one group, the other one as it is.

    The sharpness of each memory is in units of its own distances, the same number of units for all of a group.
    """
    members = _members(sample, group)
    memories = sample.run.memories
    largest = max(memories[number].saved_neighbors for number in members)
    counts = sorted({*(1 << power for power in range(largest.bit_length())), largest})
    units = {number: 1 / sample.typical_gap(memories[number].name) for number in members}
    fixed = stack(sample, memory_scores(sample, settings))
    best, best_loss = settings, math.inf
    for factor in (2.0**power for power in DOUBLINGS):
        tried = {
            number: sample.log_probs_for_all_k(
                memories[number].name,
                [min(count, memories[number].saved_neighbors) for count in counts],
                factor * units[number],
            )
            for number in members
        }
        for place, count in enumerate(counts):
            log_probs = fixed.copy()
            for number in members:
                log_probs[1 + number] = tried[number][place]
            loss = tally.loss(log_probs, tolerance=1e-5)
            if loss < best_loss:
                best = replace(settings, cache_size=count) if group == "cache" else replace(settings, k=count)
                for number in members:
                    best = _with_sharpness(sample, best, number, factor * units[number])
                best_loss = loss
    return best


def _best_saved_temperature(saved: SavedScores, settings: Settings, number: int, tally: Tally) -> Settings:
    """Where every visited entry took part, only some temperatures can be chosen from."""
    temperatures = saved.run.memories[number].saved_temperatures
    candidates = [_with_sharpness(saved, settings, number, 1 / temperature) for temperature in temperatures]
    return min(candidates, key=lambda tried: tally.loss(stack(saved, memory_scores(saved, tried))))


def _refine(saved: SavedScores, settings: Settings, number: int, tally: Tally) -> Settings:
    """The best sharpness of one memory within a factor of two, at the chosen count."""
    memory = saved.run.memories[number]
    count = settings.cache_size if memory.is_cache else settings.k
    assert count is not None  # whoever is in a group has neighbours
    log_probs = stack(saved, memory_scores(saved, settings))

    def loss(log_sharpness: float) -> float:
        limit = min(count, memory.saved_neighbors)
        log_probs[1 + number] = saved.scores(memory.name, limit, math.exp(log_sharpness)).log_probs
        return tally.loss(log_probs)

    middle = math.log(settings.theta if memory.is_cache else 1 / settings.temperatures[number])
    best = golden_section(loss, middle - math.log(2), middle + math.log(2), steps=9)
    return _with_sharpness(saved, settings, number, math.exp(best))


def golden_section(function: Callable[[float], float], low: float, high: float, steps: int) -> float:
    """The place of the minimum between low and high, to within 0.62 ** steps of the interval."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(steps - 2):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return left if at_left < at_right else right


def check_not_test(saved: SavedScores) -> None:
    """Refuse to tune on what a paper would report."""
    split = saved.run.source["split"]
    if split.startswith("test"):
        raise KnnlmError(
            f"this is the split {split}, and numbers tuned on it are no test result; tune on a save of valid and "
            "give this one to --report"
        )


def check_report(tuned: SavedScores, report: SavedScores) -> None:
    """The tokens to report must be others than those tuned on, scored by the same model with the same memories."""
    ours, theirs = tuned.run, report.run
    for fact in ("checkpoint_sha256", "dictionary_sha256"):
        if ours.source.get(fact) != theirs.source.get(fact):
            raise KnnlmError(f"the save to report is of another {fact.split('_')[0]}; score both with the same one")
    if [(m.name, m.identity) for m in ours.memories] != [(m.name, m.identity) for m in theirs.memories]:
        raise KnnlmError("the save to report has other datastores or flags; score both splits with the same ones")
    if ours.source.get("data_sha256") == theirs.source.get("data_sha256"):
        for part in tuned.parts:
            for other in report.parts:
                if part.run.start < other.run.stop and other.run.start < part.run.stop:
                    raise KnnlmError(
                        "the tokens to report are those that were tuned on, so that would be no test result; give "
                        "--report a save of another split or part"
                    )
