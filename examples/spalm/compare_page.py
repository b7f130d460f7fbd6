"""The page of the fair comparison: what the steps printed, as JSON, tables and plots."""

import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compare_steps import versions
from fairseq.data import Dictionary

from fairseq_knnlm.data.characters import is_character_level
from fairseq_knnlm.data.neighbor_table import NeighborTable
from fairseq_knnlm.report.plots import plot
from fairseq_knnlm.report.tables import table
from fairseq_knnlm.storage import write_json, write_text

if TYPE_CHECKING:
    from compare import Comparison

__all__ = ["collect", "write_json", "write_page"]

ROWS = {
    "xl": "Transformer-XL",
    "xl + kNN": "kNN-LM (Transformer-XL + kNN)",
    "spalm": "SPALM",
    "spalm + kNN": "SPALM + kNN",
}


def collect(comparison: "Comparison") -> dict[str, Any]:
    """Everything that the page says."""
    args, steps = comparison.args, comparison.steps
    scores: dict[str, dict[str, dict[str, float]]] = {}
    tuned: dict[str, dict] = {}
    for times in (1, args.test_memory):
        for kind in ("xl", "spalm"):
            for seed in args.seeds:
                name = f"{kind}-{seed}-{times}x"
                result = steps.tuned(f"tune-{name}")
                report = result["results"]["valid, report"]
                tuned[name] = {"flags": result["flags"], "tokens": report["tokens"]}
                scores.setdefault(kind, {}).setdefault(f"{times}x", {})[str(seed)] = steps.perplexity(f"score-{name}")
                scores.setdefault(f"{kind} + kNN", {}).setdefault(f"{times}x", {})[str(seed)] = report["mixture"]
    settings = [
        "layers", "dim", "ffn_dim", "heads", "lanes", "segment", "memory", "k", "cutoffs", "lr", "nprobe", "arch",
    ]  # fmt: skip
    models = [f"{kind}-{seed}" for kind in ("xl", "spalm") for seed in args.seeds]
    return {
        "about": args.about,
        "of_characters": is_character_level(Dictionary.load(str(comparison.data / "dict.txt"))),
        "versions": versions(),
        "seeds": args.seeds,
        "updates": args.updates,
        "factor_updates": args.factor_updates,
        "window": comparison.window,
        "large_window": args.large_window,
        "test_memory": args.test_memory,
        "settings": {name: getattr(args, name) for name in settings},
        "tokens": next(iter(tuned.values()))["tokens"],
        "entries": json.loads((comparison.datastore / "manifest.json").read_text())["entries"],
        "train_tokens": len(NeighborTable(comparison.work / "neighbors/train")),
        "key_lm": steps.perplexity("score-key-lm"),
        "parameters": {kind: steps.parameters(f"train-{kind}-{args.seeds[0]}") for kind in ("xl", "spalm")},
        "scores": scores,
        "tuned": tuned,
        "curves": {model: steps.curve(f"train-{model}") for model in models},
        "factors": _factors(comparison) if args.factor_updates else {},
        "hit_rates": _hit_rates(comparison),
        "recall": {split: json.loads(steps.find(f"recall-{split}", r"\[\{.*\}\]")) for split in ("train", "valid")}
        if args.recall
        else {},
        "search_seconds_per_million": float(
            steps.find("neighbors-train", r"([\d,]+) processor seconds for a million").replace(",", "")
        ),
        "steps": steps.known,
    }


def _factors(comparison: "Comparison") -> dict[str, dict]:
    steps, names = comparison.steps, ["xl", *comparison.factors()]
    return {
        name: {
            "flags": " ".join(map(str, comparison.factors()[name][0])) if name != "xl" else "",
            "perplexity": steps.perplexity(f"score-factor-{name}-1x"),
        }
        for name in names
    }


def _hit_rates(comparison: "Comparison") -> dict[str, list[float]]:
    """How often the token is among its first neighbours, of each table."""
    folders = {"train": "neighbors/train", "valid": "neighbors/valid"}
    if comparison.args.factor_updates:
        folders["train, large window"] = "neighbors-far/train"
    return {name: NeighborTable(comparison.work / path).shares_of_target().tolist() for name, path in folders.items()}


def spread(values: dict[str, float]) -> tuple[float, float]:
    """Mean and standard deviation (of the sample) over seeds."""
    numbers = list(values.values())
    return statistics.mean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def _cell(values: dict[str, float], of_characters: bool) -> str:
    digits = 3 if of_characters else 2
    if of_characters:
        values = {seed: math.log2(value) for seed, value in values.items()}
    mean, deviation = spread(values)
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


def write_page(out: Path, name: str) -> str:
    """Write OUT/NAME.md and its plots from OUT/NAME.json; the main table, for people."""
    results = json.loads((out / f"{name}.json").read_text())
    notes = out / f"{name}.notes.md"
    plots = _plots(results, out, name)
    write_text(out / f"{name}.md", page(results, notes.read_text().strip() if notes.exists() else "", plots))
    return table(*_main_table(results), left=("",))


def _main_table(results: dict) -> tuple[list[str], list[list[str]]]:
    unit = "bits per character" if results["of_characters"] else "perplexity"
    sizes = ["1x", f"{results['test_memory']}x"]
    rows = [
        [label, *(_cell(results["scores"][row][size], results["of_characters"]) for size in sizes)]
        for row, label in ROWS.items()
    ]
    alone = _cell({"": results["key_lm"]}, results["of_characters"])
    return ["", *(f"{unit}, memory {size}" for size in sizes)], [["Transformer (the frozen LM)", alone, ""], *rows]


def page(results: dict, notes: str, plots: list[tuple[str, str]]) -> str:
    kind, settings = "characters" if results["of_characters"] else "words", results["settings"]
    seeds, factors = results["seeds"], results["factors"]
    parts = [
        f"## SPALM under fair conditions, {kind} (Yogatama et al. 2021)",
        f"{results['about']} Networks of {settings['layers']} layers of {settings['dim']}, trained on "
        f"{results['train_tokens']:,} tokens for {results['updates']:,} updates of "
        f"{settings['lanes'] * settings['segment']:,} tokens; {results['parameters']['xl']:,} parameters without and "
        f"{results['parameters']['spalm']:,} with SPALM's gate; seeds {', '.join(map(str, seeds))}: mean and standard "
        f"deviation. Neighbours (K = {settings['k']}) of a frozen LM in its datastore of {results['entries']:,} "
        f"entries. Scored are {results['tokens']:,} tokens, the second half of valid, with a memory of "
        f"{settings['memory']} states as in training, and of {results['test_memory']} times as many; kNN was "
        "tuned on the first half.",
        table(*_main_table(results), markdown=True),
        notes,
        "How often the token is among its first neighbours:",
        table(*_hit_table(results), markdown=True),
    ]
    if factors:
        change = []
        for name, facts in factors.items():
            flags = f"`{facts['flags']}`" if facts["flags"] else ""
            change.append([name, flags, _cell({"": facts["perplexity"]}, results["of_characters"])])
        unit = "bits per character" if results["of_characters"] else "perplexity"
        parts += [
            f"One thing changed at a time, {results['factor_updates']:,} updates, seed {seeds[0]}; literal is the "
            f"paper's equation with K = {settings['k']} and a window of {results['window']:,} positions, the large "
            f"window {results['large_window']:,}:",
            table(["", "flags", unit], change, markdown=True),
        ]
    if results["recall"]:
        for split, rows in results["recall"].items():
            cells = [
                ["all keys" if row["nprobe"] is None else str(row["nprobe"]), f"{row['first']:.4f}",
                 f"{row['among_k']:.4f}", f"{row['right_first']:.4f}"]
                for row in rows
            ]  # fmt: skip
            header = ["nprobe", "nearest neighbour found", "of all K found", "first is the token"]
            parts += [f"What the search of {split}'s table finds:", table(header, cells, markdown=True)]
    parts.append(
        f"Searching train's table took {results['search_seconds_per_million']:,.0f} processor seconds for a million "
        "tokens. Commands, seeds and versions are in the JSON."
    )
    parts += [f"![{title}]({file})" for file, title in plots]
    return "\n\n".join(part for part in parts if part) + "\n"


def _hit_table(results: dict) -> tuple[list[str], list[list[str]]]:
    rates = results["hit_rates"]
    powers = [k for k in (1, 2, 4, 8, 16) if all(k <= len(shares) for shares in rates.values())]
    rows = [[name, *(f"{shares[k - 1]:.3f}" for k in powers)] for name, shares in rates.items()]
    return ["table", *(f"first {k}" if k > 1 else "first" for k in powers)], rows


def _plots(results: dict, out: Path, name: str) -> list[tuple[str, str]]:
    """Learning curves and the number of neighbours: (file, title)."""
    made = []
    curves = {label: points for label, points in results["curves"].items() if len(points) > 1}
    if curves:
        made.append((f"{name}-curves.svg", "Learning curves"))
        plot(
            out / made[-1][0], {label: [x for x, _ in points] for label, points in curves.items()},
            {label: [y for _, y in points] for label, points in curves.items()}, "updates", "perplexity of valid",
            log_x=False, title="Learning curves", settings=f"seeds {results['seeds']}", mark_best=False,
        )  # fmt: skip
    k = results["settings"]["k"]
    by_k = {int(n[2:]): facts["perplexity"] for n, facts in results["factors"].items() if n.startswith("k-")}
    if by_k:
        by_k[k] = results["factors"]["literal"]["perplexity"]
        made.append((f"{name}-k.svg", "Neighbours in training"))
        plot(
            out / made[-1][0], sorted(by_k), {"SPALM": [by_k[n] for n in sorted(by_k)]}, "K (in training and scoring)",
            "perplexity", title="Neighbours in training", settings=f"{results['factor_updates']:,} updates",
            powers_of_two=True,
        )  # fmt: skip
    return made
