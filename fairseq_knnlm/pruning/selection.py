"""``knnlm prune``: choose the entries that stay, and copy them with their weights to a datastore of their own."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..datastore import Datastore, Manifest
from ..datastore.dump_plan import MAX_SHARD_ROWS
from ..datastore.manifest import MANIFEST
from ..datastore.subsample import copy_part
from ..errors import KnnlmError, resumable
from ..near_matches import did_you_mean
from ..search.own_text import Placement, default_window, place_queries
from ..storage import check_disk_space, human_bytes, make_folder
from .averaging import LISTS_AT_ONCE, MeanKeys, find_averages
from .counting import count_retrievals
from .list_walk import ListWalk, QueryRows
from .merging import Merges, find_merges, heaviest
from .posterior import PosteriorOptions, learn_posterior
from .score_files import kept_scores

logger = logging.getLogger(__name__)

# Which options each method has; the others mean nothing to it.
METHODS: dict[str, tuple[str, ...]] = {
    "random": (),
    "merge": ("neighbors", "index", "weights"),
    "average": ("index", "weights"),
    "retrieved": ("neighbors", "queries", "window", "index"),
    "learned": ("queries", "window", "alpha", "updates", "temperature", "index", "weights"),
}
DEFAULTS = {"alpha": 0.2, "updates": 10}
RETRIEVED = 32  # neighbours that count as retrieved
MEMORY_PER_ENTRY = 48  # bytes, for numbers and orders of all entries


@dataclass
class PruneOptions:
    """What ``knnlm prune`` takes. None: the method's default."""

    keep: float  # share of the entries
    method: str
    seed: int = 1  # of what is drawn at random: all of it, or who stays of equals
    neighbors: int | None = None
    queries: Datastore | None = None
    window: int | None = None
    alpha: float | None = None
    updates: int | None = None
    temperature: float | None = None
    weights: bool | None = None  # False: entries stay as they are, without weights from the method
    index: str | None = None

    def check(self) -> None:
        """Refuse what makes no sense, before anything is opened or built."""
        if not 0 < self.keep <= 1:
            raise KnnlmError(f"--keep must be above 0 and at most 1, not {self.keep:g}")
        if self.method not in METHODS:
            near = did_you_mean(self.method, METHODS)
            raise KnnlmError(f"there is no method {self.method}; choose one of {', '.join(METHODS)}{near}")
        for name in {option for options in METHODS.values() for option in options}:
            if getattr(self, name) is not None and name not in METHODS[self.method]:
                flag = "--no-weights" if name == "weights" else f"--{name}"
                having = [method for method, options in METHODS.items() if name in options]
                raise KnnlmError(
                    f"{flag} is for --method {' and '.join(having)} and means nothing to {self.method}; leave it out"
                )
        for name, least in (("neighbors", 1), ("window", 0), ("updates", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise KnnlmError(f"--{name} must be {least} or more, not {value}")
        for name in ("alpha", "temperature"):
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise KnnlmError(f"--{name} must be above 0, not {value:g}")


def prune(datastore: Datastore, options: PruneOptions, output: str | Path) -> Datastore:
    """Copy the entries that a method keeps to a new folder, in corpus order.

    What the method found out about the entries stays in the datastore, so another --keep is a matter of copying.
    Interrupted, the same call goes on.
    """
    options.check()
    output, count = Path(output), round(options.keep * len(datastore))
    if output.resolve() == datastore.folder.resolve():
        raise KnnlmError("-o must be another folder than the datastore itself")
    if count == 0:
        raise KnnlmError(f"{options.keep:g} of {len(datastore):,} entries is none; use a larger --keep")
    how = {"method": options.method, "fraction": options.keep, "seed": options.seed}
    check_output(output, how)
    weighted = datastore.is_weighted or ("weights" in METHODS[options.method] and options.weights is not False)
    size = count * (datastore.manifest.entry_bytes + (4 if weighted and not datastore.is_weighted else 0))
    make_folder(output.parent)
    check_disk_space(output.parent, size, f"the {count:,} entries that are kept")
    logger.info(
        f"keeping {count:,} of {len(datastore):,} entries by the method {options.method}: {human_bytes(size)} of disk, "
        f"about {human_bytes(len(datastore) * MEMORY_PER_ENTRY)} of memory"
    )
    with resumable(f"nothing is lost; run the same command again, it goes on where it can ({datastore.folder} stays)"):
        chosen = _choose(datastore, options, count)
        shards = np.array_split(chosen.ids, -(-len(chosen.ids) // MAX_SHARD_ROWS))
        return copy_part(datastore, shards, {**how, **chosen.settings}, output, chosen.weights, chosen.gather)


def check_output(output: Path, how: dict[str, Any]) -> None:
    """Refuse a folder that holds something else, before hours of work."""
    if output.exists() and not output.is_dir():
        raise KnnlmError(f"{output} is a file, not a folder; choose another folder")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not (output / MANIFEST).exists():
        raise KnnlmError(f"{output} is not empty and not a datastore; choose another folder")
    drawn = Manifest.load(output).source.get("subsample", {})
    if {name: drawn.get(name) for name in how} != how:
        raise KnnlmError(f"{output} holds another datastore; choose another folder or delete this one")


@dataclass
class _Chosen:
    """What becomes of a datastore."""

    ids: np.ndarray  # (n,) of the entries that stay, ascending
    weights: np.ndarray | None = None  # (n,) None: as they are
    gather: Callable[[np.ndarray], np.ndarray] | None = None  # stored keys of some of them; None: as they are
    settings: dict[str, Any] = field(default_factory=dict)  # for the record


def _choose(datastore: Datastore, options: PruneOptions, count: int) -> _Chosen:
    entries, method = len(datastore), options.method
    if method == "random":
        return _Chosen(np.sort(np.random.default_rng(options.seed).permutation(entries)[:count]))
    walk = ListWalk(datastore, options.index)
    placed = None if options.queries is None else place_queries(datastore, options.queries)
    if placed is not None and placed.sentence:
        logger.info(placed.sentence)
    settings = {"index": walk.info.name, **_settings(walk, options, placed)}
    of_scores = {"method": method, "keys": datastore.fingerprint, "index_sha256": walk.info.sha256, **settings}
    found = kept_scores(datastore, of_scores, lambda: _scores(walk, options, settings, placed))
    gather = None
    if "into" in found:
        before = np.ones(entries, np.float32) if datastore.weights is None else datastore.weights
        chosen, weights, place = Merges(found["into"], found["distances"]).kept(count, before, options.seed)
        if method == "average":
            gather = MeanKeys(datastore, place).gather
    else:
        weights = found["scores"]
        chosen = heaviest(np.arange(entries), weights, count, options.seed)
        weights = weights[chosen]
    is_kept = "weights" in METHODS[method] and options.weights is not False
    return _Chosen(chosen, weights if is_kept else None, gather, {**settings, "weights": is_kept})


def _settings(walk: ListWalk, options: PruneOptions, placed: Placement | None) -> dict[str, Any]:
    """What a method's scores depend on, besides the lists."""
    if options.method == "merge":
        return {"neighbors": options.neighbors}
    if options.method == "average":
        return {"lists_at_once": LISTS_AT_ONCE}
    own_text = placed is None or placed.own_text
    if options.window is not None and not own_text:
        raise KnnlmError("--window is for queries that are the datastore's own text or a part of it; leave it out")
    window = options.window
    if own_text and window is None:
        window = default_window(options.queries or walk.datastore)
    settings = {"queries": None if options.queries is None else options.queries.fingerprint, "window": window}
    if options.method == "retrieved":
        return {**settings, "neighbors": options.neighbors or RETRIEVED}
    return {
        **settings,
        "alpha": options.alpha or DEFAULTS["alpha"],
        "updates": options.updates or DEFAULTS["updates"],
        "temperature": options.temperature or walk.temperature,
    }


def _scores(
    walk: ListWalk, options: PruneOptions, settings: dict[str, Any], placed: Placement | None
) -> dict[str, np.ndarray]:
    """What the method says of every entry."""
    if options.method in ("merge", "average"):
        if options.method == "average":
            merges = find_averages(walk, settings["lists_at_once"])
        else:
            merges = find_merges(walk, settings["neighbors"])
        return {"into": merges.into, "distances": merges.distances}
    queries = None
    if options.queries is not None:
        queries = QueryRows(walk, options.queries, None if placed is None else placed.positions)
    if options.method == "retrieved":
        return {"scores": count_retrievals(walk, settings["neighbors"], settings["window"], queries)}
    learning = {name: settings[name] for name in ("alpha", "updates", "temperature", "window")}
    return {"scores": learn_posterior(walk, PosteriorOptions(**learning), queries)}
