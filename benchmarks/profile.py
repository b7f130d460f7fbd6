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
from fairseq_knnlm.search.far_field import FarField
from fairseq_knnlm.search.target_mass import TargetMass

from .command import warm
from .original import NPROBE
from .setting import Setting

# what it is called in the table: where it is looked up when called, and its name there
STEPS = {
    "finding the lists to visit": (ListSearch, "_nearest_lists"),
    "lists: decoding keys, distances, masses": (list_visitor, "_shares_of_list"),
    "the target's part, adding up": (TargetMass, "add_shares"),
    "the far field": (FarField, "masses"),
}
WITH_ALL_THREADS = ("finding the lists to visit", "the far field")  # one call each
REST = "reading entries, sorting visits, waiting"
FAR = 64


@contextmanager
def stopwatches(seconds: dict[str, float]) -> Iterator[None]:
    """Adds up what the steps take, over all threads."""

    def timed(name: str, function):
        def run(*arguments, **named):
            started = time.perf_counter()
            result = function(*arguments, **named)
            seconds[name] += time.perf_counter() - started
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
    setting.open_datastore()
    store = setting.open_compact()
    info = build_index_if_missing(store, "auto", "l2")
    setting.eval_lm("--knn-dump", setting.work / "valid")
    asked = Datastore(setting.work / "valid")
    queries = store.codec.project(np.concatenate(list(asked.key_blocks())).astype(np.float32))
    targets = asked.values[: len(queries)].astype(np.int64)
    engine = make_engine(store, info, None, "l2", "index", "exact", NPROBE, FAR)
    if not isinstance(engine, ListSearch):
        return {"steps": {}, "queries": len(queries)}  # too few entries for clusters
    warm(index_file(store, info.name))
    seconds = dict.fromkeys(STEPS, 0.0)
    with stopwatches(seconds):
        started = time.perf_counter()
        engine.target_mass(queries, targets, [10.0])
        whole = time.perf_counter() - started
    threads = torch.get_num_threads()
    for step in WITH_ALL_THREADS:
        seconds[step] *= threads
    seconds[REST] = whole * threads - sum(seconds.values())
    return {"steps": seconds, "queries": len(queries), "threads": threads}


def table(result: dict) -> tuple[list[str], list[list[str]]]:
    whole = sum(result["steps"].values())
    lines = [
        [name, f"{seconds / result['queries'] * 1e6:.0f} us", f"{seconds / whole:.0%}"]
        for name, seconds in result["steps"].items()
    ]
    return ["", "processor time of one query", "share"], lines
