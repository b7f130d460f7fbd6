"""Perplexity of a kNN-LM on a real corpus, written to docs/results.json and docs/results.md.

    python -m benchmarks.results --data DATA-BIN --path CHECKPOINT --work DIR

runs the commands that a user would type: dump the training split, build the ``auto`` and the ``paper`` index, score the
validation split and keep the run, tune it. What is done already (the datastore, the indexes, the saves, and any command
with a result in the JSON file) is not done again; delete the JSON file to measure again. ``--report`` writes
docs/results.md and every page and plot in docs/results/ from the JSON files alone. examples/papers/run.sh writes all
of the JSON files.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from .command import REPOSITORY, eval_lm_command, parse_numbers, run

DOCS = Path(__file__).resolve().parent.parent / "docs"
EXAMPLES = DOCS.parent / "examples"
RESULTS = DOCS / "results.json"
PAGES = (
    "memories", "gate", "scaling", "domains", "mixtures", "keys", "scores", "curves", "where", "heads", "far_field",
    "compact", "pruning", "places", "sparsified", "ensembles", "overfitting", "soft_labels", "spalm", "spalm_words",
    "spalm_characters", "hugging_face", "prototypes_wikipedia", "prototypes_novels",
)  # fmt: skip
COMPARISONS = ("spalm_words", "spalm_characters")  # by examples/spalm/compare.py


class Runner:
    """Runs a command once and keeps what it printed of interest under a name."""

    def __init__(self, args):
        self.args = args
        self.results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        self.results["versions"] = {name: version(name) for name in ("fairseq-fixed", "torch", "faiss-cpu", "numpy")}
        self.results["about"] = args.about
        self.results["python"] = platform.python_version()
        self.runs = self.results.setdefault("runs", {})

    def run(self, name: str, *command: str) -> dict:
        if name not in self.runs:
            shown = " ".join(map(str, command))
            output = run(*command)["output"]
            shown = shown.replace(f"{REPOSITORY}/", "")
            for place, stand_in in ((self.args.data, "DATA"), (self.args.path, "CHECKPOINT"), (self.args.work, "WORK")):
                shown = shown.replace(str(place), stand_in)
            self.runs[name] = {"command": shown, **parse(output)}
            RESULTS.write_text(json.dumps(self.results, indent=1) + "\n")
        return self.runs[name]

    def eval_lm(self, name: str, *flags, stock: bool = False) -> dict:
        context = {name: getattr(self.args, name) for name in ("tokens_per_sample", "context_window")}
        return self.run(name, *eval_lm_command(self.args.data, self.args.path, *flags, stock=stock, **context))


def parse(output: str) -> dict:
    """The numbers that fairseq-eval-lm, the plugin and ``knnlm tune --json`` print."""
    tuned = re.search(r'^\{"flags".*$', output, re.MULTILINE)
    if tuned:
        content = json.loads(tuned[0])
        result = next(result for name, result in content["results"].items() if name.endswith("tuned on it"))
        return {
            "flags": content["flags"],
            "perplexity": result["mixture"],
            **{name: result[name] for name in ("oracle", "hit_rate", "effective_neighbors")},
        }
    seconds = {"model": "model_seconds", "search": "search_seconds", "mixing": "mixing_seconds"}
    return {seconds.get(name, name): number for name, number in parse_numbers(output).items()}


def measure(runner: Runner) -> None:
    store = Path(runner.args.work) / "datastore"
    runner.eval_lm("dump", "--gen-subset", "train", "--knn-dump", store)
    for index in runner.args.indexes:
        runner.run(f"build {index}", "knnlm", "build", store, "--index", index)
    info = subprocess.run(["knnlm", "info", str(store), "--json"], capture_output=True, text=True, check=True)
    indexes = {index["name"]: index for index in json.loads(info.stdout)["indexes"]}
    runner.results["indexes"] = {
        name: {fact: indexes[name][fact] for fact in ("factory", "bytes", "seconds")}
        for name in ("auto", "paper")
        if name in indexes
    }
    valid = ["--gen-subset", "valid"]
    runner.eval_lm("stock", *valid, stock=True)
    runner.eval_lm("base", *valid)
    knn = [*valid, "--knn-datastore", store, "--knn-preset", "paper", "--knn-index"]
    saves = Path(runner.args.work) / "saves"
    for index in runner.args.indexes:
        runner.eval_lm(f"{index} k=1024 default", *knn, index, "--knn-save", saves / index)
        runner.run(f"{index} k=1024 tuned", "knnlm", "tune", saves / index, "--json")
    if "auto" in runner.args.indexes:
        flags = runner.runs["auto k=1024 tuned"]["flags"].split()
        runner.eval_lm("auto k=1024 tuned, scored", *knn, "auto", *flags)
        runner.eval_lm("auto k=all tuned, scored", *knn, "auto", *flags, "--knn-k", "all")


ROWS = [
    ("stock `fairseq-eval-lm`, bare LM", "stock"),
    ("bare LM under our task", "base"),
    ("`auto`, k = 1024, default lambda", "auto k=1024 default"),
    ("`auto`, k = 1024, by `knnlm tune`", "auto k=1024 tuned"),
    ("`auto`, k = 1024, scored with the tuned flags", "auto k=1024 tuned, scored"),
    ("`auto`, k = all, scored with the same flags", "auto k=all tuned, scored"),
    ("`paper`, k = 1024, default lambda", "paper k=1024 default"),
    ("`paper`, k = 1024, by `knnlm tune`", "paper k=1024 tuned"),
]


def report() -> str:
    results = json.loads(RESULTS.read_text())
    runs = results["runs"]
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks.results` and the recipes in `examples/papers`; the exact commands and "
        "versions are in `results.json`.",
        "",
        f"{results['about']} {runs['dump']['entries']:,.0f} tokens in the datastore, perplexity over the "
        f"{runs['stock']['tokens']:,.0f} tokens of the validation split, which is also what was tuned on: these are "
        "validation results, not test results.",
        "",
        "| run | lambda | temperature | perplexity | oracle | hit rate | effective neighbours | tokens/s | model, s "
        "| search, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for label, name in ROWS:
        if name not in runs:
            lines.append(f"| {label} | not measured | | | | | | | | |")
            continue
        run = runs[name]
        flags = run.get("flags", run["command"])
        knn = "hit_rate" in run
        cells = [label, _flag(flags, "--knn-lambda", "0.25") if knn else ""]
        cells += [_flag(flags, "--knn-temperature", "1") if knn else "", f"{run['perplexity']:.2f}"]
        for fact, digits in (("oracle", ".2f"), ("hit_rate", ".3f"), ("effective_neighbors", ".0f")):
            cells.append(format(run[fact], digits) if run.get(fact) is not None else "")
        cells += [f"{run['tokens_per_second']:,.0f}" if "tokens_per_second" in run else ""]
        cells += [f"{run[part]:.0f}" if part in run else "" for part in ("model_seconds", "search_seconds")]
        lines.append("| " + " | ".join(cells) + " |")
    builds = [
        f"`{name}` ({index['factory']}) {index['seconds']:.0f} s, {index['bytes'] / 1e9:.2f} GB"
        for name, index in results["indexes"].items()
    ]
    lines += ["", f"Building the indexes: {'; '.join(builds)}."]
    folder = DOCS / "results"
    if (folder / "speed.json").exists():
        _write(sys.executable, "-m", "benchmarks", "--report", folder / "speed.json")
        lines += ["", "Speed beside the published method: [results/speed.md](results/speed.md)."]
    if (folder / "scale.json").exists():
        _write(sys.executable, "-m", "benchmarks.full_size", "--report", folder / "scale.json")
        lines += ["", "103 million keys of 1,024 dimensions: [results/scale.md](results/scale.md)."]
    if (folder / "cluster.json").exists():
        _write(sys.executable, "-m", "benchmarks.cluster", "--report", folder / "cluster.json")
        lines += ["", "Spread over a Ray cluster: [results/cluster.md](results/cluster.md)."]
    for page in PAGES:
        if (folder / f"{page}.json").exists():
            _write(sys.executable, *writer_of(page, folder))
            text = (folder / f"{page}.md").read_text().strip()
            lines += ["", re.sub(r"\]\((\S+\.svg)\)", r"](results/\1)", text)]  # its plots lie beside it
    return "\n".join(lines) + "\n"


def writer_of(page: str, folder: Path) -> list[object]:
    """The script with its arguments that writes a page of PAGES in a folder, from the JSON there."""
    if page in ("spalm", "hugging_face"):
        return [EXAMPLES / page / "page.py", "--report", folder]
    if page in COMPARISONS:
        return [EXAMPLES / "spalm/compare.py", "--report", "--name", page, "--out", folder]
    if page.startswith("prototypes_"):
        return [EXAMPLES / "prototypes/run.py", "--report", "--name", page, "--out", folder]
    return [EXAMPLES / f"papers/{page}.py", "--report", "--out", folder]


def _write(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


def _flag(command: str, flag: str, default: str) -> str:
    match = re.search(rf"{flag} (\S+)", command)
    return match[1] if match else default


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="binarised corpus with train and valid")
    parser.add_argument("--path", help="checkpoint")
    parser.add_argument("--work", help="folder for the datastore")
    parser.add_argument("--indexes", nargs="+", choices=["auto", "paper"], default=["auto", "paper"])
    parser.add_argument("--about", default="", help="what text, model and machine, for the report")
    parser.add_argument("--tokens-per-sample", default="256")
    parser.add_argument("--context-window", default="128")
    parser.add_argument("--report", action="store_true", help="only write results.md from results.json")
    args = parser.parse_args()
    if not args.report:
        if not (args.data and args.path and args.work):
            parser.error("--data, --path and --work are needed to measure (or --report to write the page again)")
        measure(Runner(args))
    (DOCS / "results.md").write_text(report())


if __name__ == "__main__":
    main()
