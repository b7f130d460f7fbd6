"""How the time of a query grows with the datastore: a whole split, every visited entry, compact keys."""

import statistics
import time
from pathlib import Path

import numpy as np

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.datastore.subsample import subsample
from fairseq_knnlm.index import build_index_if_missing, index_file
from fairseq_knnlm.memory.engines import make_engine

from .command import warm
from .original import NPROBE
from .setting import Setting

FAR = 64
ROUNDS = 3
TEMPERATURE = 10.0


def measure(setting: Setting, sizes: list[int]) -> dict:
    """For each number of entries (the last: all): the median time of a query; and the exponent of the growth."""
    setting.open_datastore()
    whole = setting.open_compact()
    setting.eval_lm("--knn-dump", setting.work / "valid")
    asked = Datastore(setting.work / "valid")
    queries = whole.codec.project(np.concatenate(list(asked.key_blocks())).astype(np.float32))
    targets = asked.values[: len(queries)].astype(np.int64)
    stores = [_part(whole, size, setting.work) for size in sizes if size < len(whole)] + [whole]
    rows = {len(store): _measure_store(store, queries, targets) for store in stores}
    return {"queries": len(queries), "nprobe": NPROBE, "far": FAR, "rows": rows, "exponent": exponent(rows)}


def _part(whole: Datastore, size: int, work: Path) -> Datastore:
    folder = work / f"compact-{size}"
    return Datastore(folder) if folder.exists() else subsample(whole, size / len(whole), 1, folder)


def _measure_store(store: Datastore, queries: np.ndarray, targets: np.ndarray) -> dict:
    info = build_index_if_missing(store, "auto", "l2")
    engine = make_engine(store, info, None, "l2", "index", "exact", NPROBE, FAR)
    if info.factory:
        warm(index_file(store, info.name))
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        engine.target_mass(queries, targets, [TEMPERATURE])
        seconds.append(time.perf_counter() - started)
    per_query = [1e6 * second / len(queries) for second in seconds]
    return {"us": statistics.median(per_query), "slowest": max(per_query), "fastest": min(per_query),
            "lists": info.lists}  # fmt: skip


def exponent(rows: dict) -> float | None:
    """x of "a query takes as long as the number of entries to the power of x", by least squares in logarithms."""
    if len(rows) < 2:
        return None
    entries, times = [float(size) for size in rows], [row["us"] for row in rows.values()]
    return float(np.polyfit(np.log(entries), np.log(times), 1)[0])


def table(result: dict) -> tuple[list[str], list[list[str]]]:
    lines = [
        [f"{int(size):,}", f"{row['lists']:,}", f"{row['us']:.0f} us",
         f"{row['fastest']:.0f} to {row['slowest']:.0f} us"]
        for size, row in result["rows"].items()
    ]  # fmt: skip
    if result["exponent"] is not None:
        lines.append(["exponent", "", f"{result['exponent']:.2f}", ""])
    return ["entries", "lists", "one query", "fastest to slowest"], lines
