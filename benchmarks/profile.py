"""Where the time of a search with k = all goes, over all of valid."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.index import build_index_if_missing, index_file
from fairseq_knnlm.memory.engines import make_engine
from fairseq_knnlm.search import ListSearch, list_visitor
from fairseq_knnlm.search.target_mass import TargetMass

from .command import warm
from .original import NPROBE
from .setting import Setting

# what it is called in the table: where it is looked up when called, and its name there
STEPS = {
    "finding the clusters to visit": (ListSearch, "_nearest_lists"),
    "distances: gathering queries, matrix product": (list_visitor, "block_distances"),
    "sums: largest, exp, total, target": (TargetMass, "add"),
}
REST = "reading entries, sorting visits, waiting"


@contextmanager
def stopwatches(seconds: dict[str, float]) -> Iterator[None]:
    """Adds up what the steps take, over all threads."""

    def timed(name: str, function):
        def run(*arguments, **named):
            started = time.perf_counter()
            result = function(*arguments, **named)
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
            return result

        return run

    functions = {name: getattr(*place) for name, place in STEPS.items()}
    for name, (owner, attribute) in STEPS.items():
        setattr(owner, attribute, timed(name, functions[name]))
    try:
        yield
    finally:
        for name, (owner, attribute) in STEPS.items():
            setattr(owner, attribute, functions[name])


def measure(setting: Setting) -> dict:
    """Seconds of each step, of all threads together; how many queries, and how many entries each of them visits."""
    store = setting.open_datastore()
    info = build_index_if_missing(store, "auto", "l2")
    setting.eval_lm("--knn-dump", setting.work / "valid")
    asked = Datastore(setting.work / "valid")
    queries = np.concatenate(list(asked.key_blocks())).astype(np.float32)
    targets = asked.values[: len(queries)].astype(np.int64)
    engine = make_engine(store, build_index_if_missing(store, "auto", "l2"), None, "l2", "index", "exact", NPROBE)
    if not isinstance(engine, ListSearch):
        return {"steps": {}, "queries": len(queries)}  # too few entries for clusters
    warm(index_file(store, info.name))
    seconds: dict[str, float] = {}
    with stopwatches(seconds):
        started = time.perf_counter()
        engine.target_mass(queries, targets, [10.0])
        whole = time.perf_counter() - started
    threads = torch.get_num_threads()
    seconds["finding the clusters to visit"] *= threads  # one call, on all threads
    seconds[REST] = whole * threads - sum(seconds.values())
    return {"steps": seconds, "queries": len(queries), "threads": threads}


def table(result: dict) -> tuple[list[str], list[list[str]]]:
    whole = sum(result["steps"].values())
    lines = [
        [name, f"{seconds / result['queries'] * 1e6:.0f} us", f"{seconds / whole:.0%}"]
        for name, seconds in result["steps"].items()
    ]
    return ["", "processor time of one query", "share"], lines
