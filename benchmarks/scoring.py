"""Whole scoring by each method, in turns: tokens/s and where the time goes, perplexity, memory, disk."""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.index import IndexInfo, build_index_if_missing, index_file

from .command import eval_lm_command, run, warm
from .original import write_raw
from .setting import Setting

STOCK, BARE, ORIGINAL = "stock fairseq-eval-lm, bare LM", "ours, bare LM", "original, k = 1024"
# visited, and in the far field: of the datastore, of its compact keys, and of half of these, averaged
LISTS = (("32", "64"),)
LISTS_COMPACT = (("16", "64"), ("32", "64"), ("128", "64"))
LISTS_AVERAGED = (("10", "32"), ("16", "64"), ("64", "64"))


@dataclass
class Method:
    """One of ours: a datastore and flags, to which the tuned ones come."""

    store: Datastore
    flags: list[str]
    index: IndexInfo


def methods_of(setting: Setting) -> dict[str, Method]:
    """Ours with a datastore, by name."""
    store, small, few = setting.open_datastore(), setting.open_compact(), setting.open_averaged()
    infos = [build_index_if_missing(each, "auto", "l2") for each in (store, small, few)]
    found = {
        "k = 1024": Method(store, ["--knn-k", "1024"], infos[0]),
        "k = all, 32 lists": Method(store, ["--knn-k", "all", "--knn-nprobe", "32"], infos[0]),
    }
    stores = (("k = all", store, LISTS), (f"k = all, {small.dim} x int8", small, LISTS_COMPACT),
              (f"k = all, half, averaged, {few.dim} x int8", few, LISTS_AVERAGED))  # fmt: skip
    for (name, own, lists), info in zip(stores, infos):
        for nprobe, far in lists:
            flags = ["--knn-k", "all", "--knn-nprobe", nprobe, "--knn-far", far]
            found[f"{name}, {nprobe} lists + {far} far"] = Method(own, flags, info)
    return found


def measure(setting: Setting, rounds: int) -> dict:
    """One row a method. Speed is over all of valid (the original: over the part), the median of some rounds.

    Lambda and temperature are tuned on the part, where all methods have their perplexity; that of all of valid is
    with the same flags. Bytes are those of keys, values and index for each token of train.
    """
    store, part, own = setting.open_datastore(), setting.part(), methods_of(setting)
    published = build_index_if_missing(store, "paper", "l2")
    raw = setting.work / "raw"
    write_raw(store, raw, index_file(store, "paper"))
    first = setting.tuned("1024", setting.datastore, "--knn-k", "1024")
    flags = {}
    for number, (name, method) in enumerate(own.items()):
        words, folder = method.flags, method.store.folder
        tuned = setting.tuned(f"{number}", folder, *words, "--knn-temperature", first["temperature"])
        choice = [word for flag in tuned for word in (f"--knn-{flag}", tuned[flag])]
        flags[name] = ["--knn-datastore", str(folder), "--knn-index", "auto", *words, *choice]

    def original() -> dict:
        warm(raw / "keys", index_file(store, "paper"))
        _, *rest = eval_lm_command(part, setting.path, "--gen-subset", "valid", stock=True)
        script = [sys.executable, "-m", "benchmarks.original", raw, first["lambda"], first["temperature"]]
        return run(*script, *rest)

    def ours(name: str) -> Callable[[], dict]:
        def work() -> dict:
            warm(index_file(own[name].store, "auto"))
            return setting.eval_lm(*flags[name])

        return work

    methods: dict[str, Callable[[], dict]] = {STOCK: lambda: setting.eval_lm(stock=True), BARE: setting.eval_lm}
    methods[ORIGINAL] = original
    methods |= {f"ours, {name}": ours(name) for name in flags}
    runs: dict[str, list[dict]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            runs[name].append(method())
    bare = setting.eval_lm(data=part)["perplexity"]
    rows = {}
    for name, results in runs.items():
        row = _summary(results)
        row["perplexity_of_all"] = row["perplexity"] if name != ORIGINAL else None
        row["perplexity"] = bare if name in (STOCK, BARE) else row["perplexity"]
        if name.startswith("ours, k"):
            label = name.removeprefix("ours, ")
            row["perplexity"] = setting.eval_lm(*flags[label], data=part)["perplexity"]
            row["bytes_per_entry"] = (_store_bytes(own[label].store) + _index_bytes(own[label])) / len(store)
            values = own[label].store.value_bytes * len(own[label].store)
            row["bytes_without_keys"] = (values + _index_bytes(own[label])) / len(store)  # after --drop-keys
        elif name == ORIGINAL:
            row["bytes_per_entry"] = (_store_bytes(store) + published.bytes) / len(store)
            whole = row["tokens"] / row["tokens_per_second"]
            row["mixing"] = max(0.0, whole - sum(row[part_] for part_ in ("model", "search", "rescoring")))
        row["command"] = setting.anywhere(row["command"])
        rows[name] = row
    return {"rows": rows, "rounds": rounds, "entries": len(store), "dim": store.dim}


def _summary(results: list[dict]) -> dict:
    """The run of the median speed, with the slowest and the fastest."""
    speeds = [result["tokens_per_second"] for result in results]
    middle = min(results, key=lambda result: abs(result["tokens_per_second"] - statistics.median(speeds)))
    kept = {name: value for name, value in middle.items() if name not in ("output", "stdout")}
    return {**kept, "slowest": min(speeds), "fastest": max(speeds)}


def _store_bytes(store: Datastore) -> int:
    return sum(path.stat().st_size for path in Path(store.folder).glob("*-*.npy"))


def _index_bytes(method: Method) -> int:
    """With what stands beside it."""
    folder = index_file(method.store, method.index.name).parent
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def table(result: dict) -> tuple[list[str], list[list[str]]]:
    rows = result["rows"]
    speed = {name: row["tokens_per_second"] for name, row in rows.items()}
    header = ["", "tokens/s", "slowest to fastest", "x original", "x stock", "x bare LM", "model", "search",
              "rescoring", "perplexity", "of all of valid", "peak memory", "bytes per entry",
              "after --drop-keys"]  # fmt: skip
    lines = []
    for name, row in rows.items():
        parts = [
            f"{row[part] / row['tokens'] * 1e6:.0f} us" if row.get(part) else ""
            for part in ("model", "search", "rescoring")
        ]
        lines.append([
            name, f"{speed[name]:,.0f}", f"{row['slowest']:,.0f} to {row['fastest']:,.0f}" if "slowest" in row else "",
            *(f"{speed[name] / speed[other]:.2f}" for other in (ORIGINAL, STOCK, BARE)), *parts,
            f"{row['perplexity']:.2f}", f"{row['perplexity_of_all']:.2f}" if row.get("perplexity_of_all") else "",
            f"{row['peak_memory'] / 1e9:.1f} GB" if row["peak_memory"] else "",
            *(f"{row[name]:,.0f}" if name in row else "" for name in ("bytes_per_entry", "bytes_without_keys")),
        ])  # fmt: skip
    return header, lines
