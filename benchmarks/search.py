"""The search alone: recall, latency of one query, and how both grow with the datastore."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.datastore.subsample import subsample
from fairseq_knnlm.index import build_index_if_missing, index_file
from fairseq_knnlm.memory import DatastoreMemory
from fairseq_knnlm.memory.engines import make_engine
from fairseq_knnlm.search import ExactSearch

from .command import warm
from .original import NPROBE, K, PlainKNN, build_from, write_raw
from .setting import Setting

WARM_UP, TIMED = 50, 200  # single queries
FEW_LISTS, FAR = 16, 64  # of compact keys


def measure(setting: Setting, sizes: list[int]) -> dict:
    """For each number of entries (the last: all) and each method: recall, queries/s, p50 and p95 of one query."""
    whole = setting.open_datastore()
    asked = setting.queries()
    queries = torch.from_numpy(np.concatenate(list(asked.key_blocks())).astype(np.float32))
    targets = torch.from_numpy(asked.values[: len(queries)].astype(np.int64))
    results = {}
    for size in [*(size for size in sizes if size < len(whole)), len(whole)]:
        store = whole
        if size < len(whole):
            folder = setting.work / f"entries-{size}"
            store = Datastore(folder) if (folder / "index").exists() else subsample(whole, size / len(whole), 1, folder)
        results[f"{len(store):,}"] = _measure_store(store, paper_index(whole, store), queries, targets)
    compact, averaged = setting.open_compact(), setting.open_averaged()
    for name, store in ((f"{compact.dim} x int8", compact), ("half, averaged", averaged)):
        row = measure_of_all(store, queries, targets, FAR)
        results[f"{len(whole):,}"][f"ours, k = all, {name}, {FEW_LISTS} lists + {FAR} far"] = row
    return results


def paper_index(whole: Datastore, store: Datastore) -> Path:
    """The original's index; for a part of the datastore with the clusters and codes of the whole."""
    build_index_if_missing(whole, "paper", "l2")
    trained = index_file(whole, "paper")
    if store is whole:
        return trained
    path = store.folder / "paper.faiss"
    if not path.exists():
        build_from(trained, store, path)
    return path


def _measure_store(store: Datastore, paper: Path, queries: torch.Tensor, targets: torch.Tensor) -> dict:
    vocabulary = store.manifest.source["dictionary_size"]
    auto = build_index_if_missing(store, "auto", "l2")
    raw = store.folder / "raw"
    write_raw(store, raw, paper)
    sample = queries[:: max(1, len(queries) // 200)]
    _, truth = ExactSearch(store, "l2").search(sample.numpy(), K)
    warm(raw / "keys", paper)
    plain = PlainKNN(raw)
    found = plain.index.search(sample.numpy(), K)[1]
    few, few_targets = queries[:2000], targets[:2000]
    rows: dict[str, dict] = {
        "original, k = 1024": {
            "recall": _recall(found, truth),
            "queries_per_second": _speed(lambda: plain.target_log_probs(few, few_targets, 10.0), few),
            **_latency(lambda query: plain.target_log_probs(query, targets[:1], 10.0), queries),
        }
    }
    if auto.factory:
        warm(index_file(store, "auto"))
    for k in (K, None):
        far = 0 if k else FAR
        engine = make_engine(store, build_index_if_missing(store, "auto", "l2"), k, "l2", "index", "exact", NPROBE, far)
        retriever = DatastoreMemory(store, engine, k, 0.25, 10.0, "l2")
        rows[f"ours, k = {k}" if k else f"ours, k = all, {NPROBE} lists + {FAR} far"] = {
            "recall": _recall(engine.search(sample.numpy(), K)[1], truth),
            "queries_per_second": _speed(lambda r=retriever: r.target_log_probs(queries, targets), queries),
            **_latency(lambda query, r=retriever: r.vocabulary_log_probs(query, vocabulary), queries),
        }
    return rows


def measure_of_all(store: Datastore, queries: torch.Tensor, targets: torch.Tensor, far: int) -> dict:
    """k = all with few lists and the far field. Of entries that are others than the original's there is no recall."""
    info = build_index_if_missing(store, "auto", "l2")
    engine = make_engine(store, info, None, "l2", "index", "exact", FEW_LISTS, far)
    memory = DatastoreMemory(store, engine, None, 0.25, 10.0, "l2")
    vocabulary = store.manifest.source["dictionary_size"]
    if info.factory:
        warm(index_file(store, info.name))
    return {
        "queries_per_second": _speed(lambda: memory.target_log_probs(queries, targets), queries),
        **_latency(lambda query: memory.vocabulary_log_probs(query, vocabulary), queries),
    }


def _recall(found: np.ndarray, truth: np.ndarray) -> float:
    return float(np.mean([len(np.intersect1d(a, b)) / len(b) for a, b in zip(found, truth)]))


def _speed(work: Callable[[], object], queries: torch.Tensor) -> float:
    """Queries a second, the better of two times."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return len(queries) / min(times)


def _latency(work: Callable[[torch.Tensor], object], queries: torch.Tensor) -> dict:
    """Milliseconds of one query. The original's is for one target, ours for every token, as generation needs it."""
    times = []
    for number in range(WARM_UP + TIMED):
        query = queries[number * 37 % len(queries)][None]
        started = time.perf_counter()
        work(query)
        times.append(time.perf_counter() - started)
    p50, p95 = np.percentile(np.array(times[WARM_UP:]) * 1e3, [50, 95])
    return {"p50_ms": float(p50), "p95_ms": float(p95)}


def table(results: dict) -> tuple[list[str], list[list[str]]]:
    header = ["entries", "", "recall@1024", "queries/s", "x original", "p50", "p95"]
    lines = []
    for entries, rows in results.items():
        original = rows["original, k = 1024"]["queries_per_second"]
        for name, row in rows.items():
            speed = row["queries_per_second"]
            lines.append([
                entries, name, f"{row['recall']:.3f}" if "recall" in row else "", f"{speed:,.0f}",
                f"{speed / original:.1f}", f"{row['p50_ms']:.2f} ms", f"{row['p95_ms']:.2f} ms",
            ])  # fmt: skip
    return header, lines
