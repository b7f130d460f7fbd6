"""One knob varied over a saved run, everything else fixed: rows for tables and plots."""

from dataclasses import asdict, dataclass, replace

from ..errors import KnnlmError
from .choice import Choice, Result, evaluate, with_best_weights
from .evidence import Evidence

KNOBS = ("lambda", "temperature", "k", "cache-lambda", "cache-theta", "cache-size")


@dataclass(frozen=True)
class Row:
    """One point of a sweep."""

    value: float
    choice: Choice
    result: Result

    def facts(self, knob: str) -> dict:
        """Flat, for CSV and JSON."""
        return {knob: self.value, "weights": list(self.choice.weights), **asdict(self.result)}


def default_values(evidence: Evidence, knob: str) -> list[float]:
    """A grid that shows the whole curve."""
    if knob in ("lambda", "cache-lambda"):
        return [round(0.05 * step, 2) for step in range(20)]
    if knob in ("k", "cache-size"):
        memories = [evidence.cache] if knob == "cache-size" else evidence.knn_memories
        largest = max(memory.neighbors for memory in memories)
        return sorted({*(1 << power for power in range(largest.bit_length())), largest})
    if knob == "temperature":
        saved = evidence.knn_memories[0].temperatures
        return sorted(saved) if saved else [0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50, 100]
    return [evidence.cache.sharpness * 2.0**power for power in range(-4, 5)]


def sweep(
    evidence: Evidence, knob: str, values: list[float] | None, base: Choice, retune_weights: bool = False
) -> list[Row]:
    """Results over a knob; with ``retune_weights`` each at its own best lambdas (of this very text)."""
    check_saved(evidence, knob)
    rows = []
    for value in values or default_values(evidence, knob):
        choice = set_knob(evidence, base, knob, value)
        if retune_weights:
            choice = with_best_weights(evidence, choice)
        rows.append(Row(value, choice, evaluate(evidence, choice)))
    return rows


def check_saved(evidence: Evidence, knob: str) -> None:
    """Whether the save can tell about this knob."""
    if knob.startswith("cache"):
        if not evidence.cache:
            raise KnnlmError(f"no cache was saved, so there is no {knob}; score again with --knn-cache-size --knn-save")
    elif not evidence.knn_memories:
        raise KnnlmError(f"no datastore was used, so there is no {knob}; score again with --knn-datastore --knn-save")
    elif knob == "k" and all(memory.neighbors is None for memory in evidence.knn_memories):
        raise KnnlmError("with --knn-k all no neighbours are saved, so there is no k; score again with --knn-k 1024")


def set_knob(evidence: Evidence, base: Choice, knob: str, value: float) -> Choice:
    """The choice with one knob at another value, refused where fairseq-eval-lm would refuse it."""
    knn = len(evidence.knn_memories)
    if knob in ("lambda", "cache-lambda"):
        weights = list(base.weights)
        if knob == "cache-lambda":
            weights[-1] = value
        else:
            weights[:knn] = [value] * knn
        if min(weights) < 0 or sum(weights) > 1 + 1e-9:
            raise KnnlmError(f"{knob} {value:g} makes the weights sum to {sum(weights):g}; keep them between 0 and 1")
        return replace(base, weights=tuple(weights))
    if knob in ("k", "cache-size"):
        if value != int(value) or value < 1:
            raise KnnlmError(f"{knob} must be a whole number from 1 up, not {value:g}")
        return replace(base, **{"k" if knob == "k" else "cache_size": int(value)})
    if not value > 0:
        raise KnnlmError(f"{knob} must be above 0, not {value:g}")
    return replace(base, **{"temperature" if knob == "temperature" else "theta": value})
