"""Whole scoring by each method: tokens/s and where the time goes, perplexity, memory, disk."""

import sys
from pathlib import Path

from fairseq_knnlm.index import build_index_if_missing, index_file

from .command import run, warm
from .original import write_raw
from .setting import Setting


def measure(setting: Setting) -> dict:
    """One row a method. Speed is over all of valid (the original: over the part); perplexity over the part for all."""
    store = setting.open_datastore()
    indexes = {name: build_index_if_missing(store, name, "l2") for name in ("auto", "paper")}
    raw = setting.work / "raw"
    write_raw(store, raw, index_file(store, "paper"))
    part = setting.part()
    flags = {"1024": setting.tuned("1024"), "all": {}}
    flags["all"] = setting.tuned("all", "--knn-temperature", flags["1024"]["temperature"])
    choice = {k: [word for name in tuned for word in (f"--knn-{name}", tuned[name])] for k, tuned in flags.items()}
    knn = ["--knn-datastore", setting.datastore, "--knn-index", "auto"]
    key_bytes = sum(path.stat().st_size for path in Path(setting.datastore).glob("*-*.npy"))
    disk = {name: key_bytes + index.bytes for name, index in indexes.items()}

    rows = {}
    bare = setting.eval_lm(data=part)["perplexity"]
    rows["stock fairseq-eval-lm, bare LM"] = {**setting.eval_lm(stock=True), "perplexity": bare}
    rows["ours, bare LM"] = {**setting.eval_lm(), "perplexity": bare}
    warm(raw / "keys", index_file(store, "paper"))
    rows["original, k = 1024"] = {
        **run(
            sys.executable, "-m", "benchmarks.original", raw, flags["1024"]["lambda"], flags["1024"]["temperature"],
            part, "--path", setting.path, "--gen-subset", "valid", *setting.context, "--no-progress-bar",
        ),
        "disk": disk["paper"],
    }  # fmt: skip
    warm(index_file(store, "auto"))
    for k in ("1024", "all"):
        perplexity = setting.eval_lm(*knn, "--knn-k", k, *choice[k], data=part)["perplexity"]
        rows[f"ours, k = {k}"] = {
            **setting.eval_lm(*knn, "--knn-k", k, *choice[k]),
            "perplexity": perplexity,
            "disk": disk["auto"],
        }
    original = rows["original, k = 1024"]
    whole = original["tokens"] / original["tokens_per_second"]
    original["mixing"] = max(0.0, whole - sum(original[part] for part in ("model", "search", "rescoring")))
    for row in rows.values():
        del row["output"]
        row["command"] = setting.anywhere(row["command"])
    return {
        "rows": rows,
        "flags": flags,
        "entries": len(store),
        "dim": store.dim,
        "indexes": {name: {"factory": index.factory, "bytes": index.bytes} for name, index in indexes.items()},
    }


def table(result: dict) -> tuple[list[str], list[list[str]]]:
    rows = result["rows"]
    stock = rows["stock fairseq-eval-lm, bare LM"]["tokens_per_second"]
    original = rows["original, k = 1024"]["tokens_per_second"]
    header = ["", "tokens/s", "x original", "x stock", "model", "search", "rescoring", "mixing", "perplexity",
              "peak memory", "disk"]  # fmt: skip
    lines = []
    for name, row in rows.items():
        speed = row["tokens_per_second"]
        parts = [
            f"{row[part] / row['tokens'] * 1e6:.0f} us" if row.get(part) else ""
            for part in ("model", "search", "rescoring", "mixing")
        ]
        lines.append([
            name, f"{speed:,.0f}", f"{speed / original:.2f}", f"{speed / stock:.2f}", *parts,
            f"{row['perplexity']:.2f}", f"{row['peak_memory'] / 1e9:.1f} GB" if row["peak_memory"] else "",
            f"{row['disk'] / 1e9:.1f} GB" if "disk" in row else "",
        ])  # fmt: skip
    return header, lines
