"""One knob varied over a saved run, everything else fixed: rows for tables and plots."""

from dataclasses import asdict, dataclass, replace

from ..errors import KnnlmError
from .scores import SavedScores
from .settings import Result, Settings, evaluate, with_best_weights


@dataclass(frozen=True)
class Row:
    """One point of a sweep."""

    value: float
    settings: Settings
    result: Result
    split: str = ""  # of what text

    def facts(self, knob: str) -> dict:
        """Flat, for CSV and JSON."""
        return {knob: self.value, "weights": list(self.settings.weights), **asdict(self.result)}


def default_values(saved: SavedScores, knob: str, base: Settings) -> list[float]:
    """A grid that shows the whole curve."""
    if knob.endswith("lambda"):
        own = weights_of(saved, knob)
        varied = own.stop - own.start
        fixed = (*base.weights[: own.start], *base.weights[own.stop :])
        grid = [round(0.05 * step, 2) for step in range(20)]
        return [value for value in grid if varied * value + sum(fixed) <= 1 + 1e-9]  # as far as the others leave room
    if knob in ("k", "cache-size"):
        memories = [saved.saved_cache] if knob == "cache-size" else saved.knn_memories
        largest = max(memory.saved_neighbors for memory in memories)
        return sorted({*(1 << power for power in range(largest.bit_length())), largest})
    if knob == "temperature":
        return _saved_temperatures(saved) or [0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50, 100]
    return [saved.saved_cache.sharpness * 2.0**power for power in range(-4, 5)]


def weights_of(saved: SavedScores, knob: str) -> slice:
    """Which of the weights a lambda sets: those of the datastores, of the heads, or the cache's."""
    knn, heads, count = len(saved.knn_memories), len(saved.heads), len(saved.run.memories)
    return {"lambda": slice(0, knn), "head-lambda": slice(knn, knn + heads)}.get(knob, slice(count - 1, count))


def _saved_temperatures(saved: SavedScores) -> list[float]:
    """Those that every datastore was saved at, ascending; none where any temperature can be computed."""
    grids = [memory.temperatures for memory in saved.knn_memories if memory.temperatures]
    common = sorted(set.intersection(*(set(grid) for grid in grids))) if grids else []
    if grids and not common:
        raise KnnlmError(
            "the datastores were scored at temperatures that have none in common, so one temperature cannot be varied "
            "for all of them; score again with one --knn-temperature --knn-save"
        )
    return common


def sweep(
    saved: SavedScores, knob: str, values: list[float] | None, base: Settings, retune_weights: bool = False
) -> list[Row]:
    """Results over a knob; with ``retune_weights`` each at its own best lambdas (of this very text)."""
    check_saved(saved, knob)
    rows = []
    for value in values or default_values(saved, knob, base):
        settings = set_knob(saved, base, knob, value)
        if retune_weights:
            settings = with_best_weights(saved, settings)
        rows.append(Row(value, settings, evaluate(saved, settings), saved.run.source.get("split", "")))
    return rows


def check_saved(saved: SavedScores, knob: str) -> None:
    """Whether the save can tell about this knob."""
    if knob.startswith("cache"):
        if not saved.cache:
            raise KnnlmError(f"no cache was saved, so there is no {knob}; score again with --knn-cache-size --knn-save")
    elif knob.startswith("head"):
        if not saved.heads:
            raise KnnlmError(f"no head was used, so there is no {knob}; score again with --knn-head --knn-save")
    elif not saved.knn_memories:
        raise KnnlmError(f"no datastore was used, so there is no {knob}; score again with --knn-datastore --knn-save")
    elif knob == "k" and all(memory.neighbors is None for memory in saved.knn_memories):
        raise KnnlmError("with --knn-k all no neighbours are saved, so there is no k; score again with --knn-k 1024")


def set_knob(saved: SavedScores, base: Settings, knob: str, value: float) -> Settings:
    """The settings with one knob at another value, refused where fairseq-eval-lm would refuse it."""
    if knob.endswith("lambda"):
        weights, own = list(base.weights), weights_of(saved, knob)
        weights[own] = [value] * (own.stop - own.start)
        if min(weights) < 0 or sum(weights) > 1 + 1e-9:
            raise KnnlmError(f"{knob} {value:g} makes the weights sum to {sum(weights):g}; keep them between 0 and 1")
        return replace(base, weights=tuple(weights))
    if knob in ("k", "cache-size"):
        if value != int(value) or value < 1:
            raise KnnlmError(f"{knob} must be a whole number from 1 up, not {value:g}")
        return replace(base, k=int(value)) if knob == "k" else replace(base, cache_size=int(value))
    if not value > 0:
        raise KnnlmError(f"{knob} must be above 0, not {value:g}")
    return base.at_temperature(value) if knob == "temperature" else replace(base, theta=value)
