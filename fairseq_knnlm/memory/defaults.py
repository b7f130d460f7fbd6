"""The values of flags that were not given: of a preset, as tuned with ``knnlm tune --keep``, or from the datastore.

fairseq tells values only, not which flags were typed; so these flags have the default None, and here, and nowhere else,
it is decided what that means.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..datastore import Datastore
from ..datastore.tuned import TunedValues, read_tuned
from ..errors import KnnlmError
from ..index import IndexInfo, list_indexes
from ..index.temperature import measure_temperature
from .extent import NUMBER, limit_k, lists_of_far_field, lists_to_visit, parse_k, why_not_all
from .presets import flag, has_fixed_mixture

logger = logging.getLogger(__name__)

WEIGHT = 0.25
CACHE_WEIGHT, THETA = 0.1, 0.1
TUNE = "--knn-save SAVE, then knnlm tune SAVE --keep"


@dataclass
class DatastoreValues:
    """How the datastores of a run take part in the mixture."""

    k: int | None  # neighbours per query; None: every visited entry
    weights: list[float]  # lambda of each datastore
    temperatures: list[float]  # of each datastore
    far: list[int]  # how many lists are in the far field of each datastore


def choose_values(
    args: Any, datastores: list[Datastore], indexes: list[IndexInfo | None], heads: Sequence[str] = ()
) -> DatastoreValues:
    """k, lambda, temperature and far field of each datastore; says in a line where each comes from that no flag gave.

    Args:
        indexes: of each datastore; None: it is searched without one
        heads: fingerprints of the heads of the mixture
    """
    count, entries = len(datastores), [len(datastore) for datastore in datastores]
    k, weights, temperatures = (flag(args, name) for name in ("knn_k", "knn_lambda", "knn_temperature"))
    needs_number = why_not_all(args, indexes)
    tuned: list[TunedValues] = []
    if weights is None or temperatures is None:
        kinds = {parse_k(k) is None} if k is not None else {False} if needs_number else {True, False}
        tuned, why_not = find_tuned(args, datastores, kinds, heads)
        if why_not:
            logger.info(f"values that knnlm tune --keep found are not used: {why_not}; tune this mixture with {TUNE}")
    if k is not None:
        neighbors = limit_k(parse_k(k), entries, can_be_all=not needs_number)
    elif tuned:
        neighbors = tuned[0].k
    else:
        neighbors = min(NUMBER, max(entries)) if needs_number else None
        if needs_number:
            logger.info(f"k is {neighbors}: {needs_number}; give --knn-k for another one")
    far = [lists_of_far_field(args, neighbors, info) for info in indexes]
    if tuned:
        _say_tuned(args, tuned, far[0])
        weights = ",".join(repr(each.weight) for each in tuned) if weights is None else weights
        temperatures = ",".join(repr(each.temperature) for each in tuned) if temperatures is None else temperatures
    return DatastoreValues(
        k=neighbors,
        weights=parse_weights(WEIGHT if weights is None else weights, count),
        temperatures=_own_temperatures(args, datastores, indexes)
        if temperatures is None
        else parse_temperatures(temperatures, count),
        far=far,
    )


# --- lambda and temperature -------------------------------------------------------------------------------------------


def parse_weights(value: object, count: int) -> list[float]:
    """--knn-lambda: one value for every datastore, or one each."""
    weights = _numbers("--knn-lambda", value, count)
    if any(not 0 <= weight <= 1 for weight in weights) or sum(weights) > 1 + 1e-9:
        raise KnnlmError(f"each --knn-lambda must be between 0 and 1 and their sum at most 1, not {value}")
    return weights


def parse_head_weights(value: object, count: int) -> list[float]:
    """--knn-head-lambda: one value for every head, or one each."""
    weights = _numbers("--knn-head-lambda", value, count, "heads")
    if any(not 0 <= weight <= 1 for weight in weights) or sum(weights) > 1 + 1e-9:
        raise KnnlmError(f"each --knn-head-lambda must be between 0 and 1 and their sum at most 1, not {value}")
    return weights


def parse_temperatures(value: object, count: int) -> list[float]:
    """--knn-temperature: one value for every datastore, or one each."""
    temperatures = _numbers("--knn-temperature", value, count)
    if any(not temperature > 0 for temperature in temperatures):
        raise KnnlmError(f"--knn-temperature must be above 0, not {value}")
    return temperatures


def _numbers(name: str, value: object, count: int, what: str = "datastores") -> list[float]:
    try:
        numbers = [float(part) for part in str(value).split(",")]
    except ValueError as error:
        raise KnnlmError(f"{name} takes numbers separated by commas, not '{value}'") from error
    if len(numbers) == 1:
        numbers *= count
    if len(numbers) != count:
        raise KnnlmError(f"{name} has {len(numbers)} values for {count} {what}; give one, or one each")
    return numbers


def _own_temperatures(args: Any, datastores: list[Datastore], indexes: list[IndexInfo | None]) -> list[float]:
    """Temperatures at the scale of each datastore's own distances."""
    temperatures, metric = [], str(args.knn_metric)
    for datastore, info in zip(datastores, indexes):
        known = [info] if info is not None else list_indexes(datastore)
        found = next((each.temperature for each in known if each.metric == metric and each.temperature), None)
        found = found or measure_temperature(datastore, metric, thorough=False)
        temperatures.append(found or 1.0)
        of = "this datastore" if len(datastores) == 1 else str(datastore.folder)
        if found:
            logger.info(f"temperature {found:g}, from the distances between neighbours in {of}; tune it with {TUNE}")
        else:
            logger.info(f"temperature 1, for {of} has too few different entries to measure one; tune it with {TUNE}")
    return temperatures


# --- what knnlm tune --keep found -------------------------------------------------------------------------------------


def find_tuned(
    args: Any, datastores: list[Datastore], kinds: set[bool], heads: Sequence[str] = ()
) -> tuple[list[TunedValues], str]:
    """What was tuned for this very mixture, for each datastore; else why what is there does not fit, if anything is.

    Args:
        kinds: of k that would do: True for all, False for a number
        heads: fingerprints of the heads of the mixture
    """
    keys = [datastore.fingerprint for datastore in datastores]
    kept = [read_tuned(datastore.folder, own) for datastore, own in zip(datastores, keys)]
    with_cache, found = bool(args.knn_cache_size), []
    for number, values in enumerate(kept):
        if not values:
            return [], f"there are none for {datastores[number].folder}" if any(kept) else ""
        beside = sorted(keys[:number] + keys[number + 1 :])
        values = [each for each in values if each.beside == beside]
        if not values:
            return [], "they are for a mixture with other datastores"
        values = [each for each in values if set(each.heads) == set(heads)]
        if not values:
            return [], f"they are for a mixture with {'other heads' if heads else 'heads'}"
        values = [each for each in values if (each.cache_size is not None) == with_cache]
        if not values:
            return [], f"they are for a mixture with{'out' if with_cache else ''} a cache"
        for name in ("metric", "score"):
            wanted, there = str(getattr(args, f"knn_{name}")), getattr(values[-1], name)
            values = [each for each in values if getattr(each, name) == wanted]
            if not values:
                return [], f"they are for --knn-{name} {there}"
        fitting = [each for each in values if (each.k is None) in kinds]
        if not fitting:
            return [], f"they are for --knn-k {values[-1].k or 'all'}"
        found.append(fitting[-1])
    if len({each.when for each in found}) > 1:
        return [], "they were not tuned together"
    return found, ""


def _say_tuned(args: Any, tuned: list[TunedValues], far: int) -> None:
    first, said = tuned[0], []
    missing = [name for name in ("lambda", "temperature") if flag(args, f"knn_{name}") is None]
    if flag(args, "knn_k") is None and first.k is not None:
        said.append(f"k {first.k}")
    for name, values in (("lambda", [t.weight for t in tuned]), ("temperature", [t.temperature for t in tuned])):
        if name in missing:
            said.append(f"{name} {','.join(f'{value:g}' for value in values)}")
    origin = f"{first.origin}, knnlm tune --keep{_other_search(args, first, far)}"
    logger.info(f"{' and '.join(said)} as {origin}; give {' or '.join(f'--knn-{name}' for name in missing)} for others")


def _other_search(args: Any, tuned: TunedValues, far: int) -> str:
    """What was another choice when values were tuned, which changes them a little."""
    here = {"mask": str(args.knn_mask), "nprobe": lists_to_visit(args), "far": far}
    there = {name: tuned.search.get(name, value) for name, value in {**here, "far": 0}.items()}
    other = [f"{name} {there[name]}" for name in here if there[name] != here[name]]
    return f" (with {' and '.join(other)})" if other else ""


def choose_cache_values(
    args: Any, datastores: list[Datastore], k: int | None, heads: Sequence[str] = ()
) -> tuple[float, float]:
    """Lambda and theta of the cache, beside datastores that are searched with this k."""
    weight, theta = args.knn_cache_lambda, args.knn_cache_theta
    if datastores and not has_fixed_mixture(args) and (weight is None or theta is None):
        tuned, _ = find_tuned(args, datastores, {k is None}, heads)
        if tuned:
            said = [f"cache lambda {tuned[0].cache_weight:g}"] if weight is None else []
            said += [f"cache theta {tuned[0].theta:g}"] if theta is None else []
            size = tuned[0].cache_size
            where = "" if size == args.knn_cache_size else f" with --knn-cache-size {size}"
            logger.info(f"{' and '.join(said)} as {tuned[0].origin}{where}, knnlm tune --keep")
            weight = tuned[0].cache_weight if weight is None else weight
            theta = tuned[0].theta if theta is None else theta
    return CACHE_WEIGHT if weight is None else weight, THETA if theta is None else theta
