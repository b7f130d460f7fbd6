"""The table of examples/hugging_face: what each memory adds to a pre-trained LM, in two domains.

    python examples/hugging_face/page.py WORK --out DIR [--names Wikipedia novels] [--about TEXT]
    python examples/hugging_face/page.py --report DIR     writes DIR/hugging_face.md again from the JSON file

Everything is tuned on the first half of valid (``knnlm tune``), and reported on the second. Perplexities are per word:
that of a token says nothing about models with other tokenizers.
"""

import argparse
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from fairseq_knnlm.report.tables import table
from fairseq_knnlm.storage import make_folder, to_json, write_json, write_text

NAME = "hugging_face"
ROWS = {"+ kNN": ["--without", "cache"], "+ cache": ["--without", "knn0"], "+ kNN + cache": []}
RUNS = ("text-text", "other-other", "other-text")
# Xu, Alon and Neubig (2023), Table 4: perplexity of the LM alone, and with a datastore of WikiText-103.
PAPER = {"DistilGPT-2": (18.25, 14.84), "GPT-2 large": (10.56, 9.76)}
PACKAGES = ("fairseq-fixed", "torch", "faiss-cpu", "numpy", "transformers", "tokenizers")


def tune(work: Path, run: str, flags: list[str]) -> dict:
    """Tuned on the first half, reported on the second."""
    first, second = work / f"saves/{run}-0", work / f"saves/{run}-1"
    command = ["knnlm", "tune", first, "--report", second, *flags, "--json"]
    printed = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout
    content = json.loads(printed)
    return {"flags": content["flags"], **content["results"]["valid, report"]}


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


def measure(work: Path, names: list[str], about: str) -> dict:
    domains = dict(zip(("text", "other"), names))
    runs = {}
    for run in RUNS:
        scored, stored = run.split("-")
        manifest = read_json(work / f"datastore-{stored}/manifest.json")
        facts = read_json(work / f"saves/{run}-1/run.json")
        runs[run] = {
            "scored": domains[scored], "datastore": domains[stored], "entries": manifest["entries"],
            "words": facts["words"], "bytes": facts["bytes"], "tokens": facts["stop"] - facts["start"],
            "rows": {label: tune(work, run, flags) for label, flags in ROWS.items()},
        }  # fmt: skip
    source = read_json(work / "datastore-text/manifest.json")["source"]
    context = {name: source[name] for name in ("tokens_per_sample", "context_window")}
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    return {"about": about, "context": context, "versions": versions, "runs": runs}


def per_word(perplexity: float, run: dict) -> float:
    return perplexity ** (run["tokens"] / run["words"])


def rows_of(run: dict) -> list[list[str]]:
    """The LM and its mixtures on one text."""
    base = per_word(next(iter(run["rows"].values()))["lm"], run)
    rows = [[f"{run['scored']}: LM", f"{base:.2f}", "", f"{next(iter(run['rows'].values()))['lm']:.2f}", ""]]
    for label, row in run["rows"].items():
        value = per_word(row["mixture"], run)
        name = label.replace("kNN", f"kNN ({run['datastore']})")
        rows.append([name, f"{value:.2f}", f"{value / base - 1:+.1%}", f"{row['mixture']:.2f}", f"`{row['flags']}`"])
    return rows


def write_page(folder: Path) -> None:
    content = read_json(folder / f"{NAME}.json")
    runs, context = content["runs"], content["context"]
    own, adapted = runs["text-text"], runs["other-other"]
    block = context["tokens_per_sample"] - context["context_window"]
    header = ["", "perplexity per word", "", "per token", "tuned flags"]
    cells = [row for run in RUNS for row in rows_of(runs[run])]
    paper = [[name, f"{lm:.2f}", f"{knn:.2f}", f"{knn / lm - 1:+.1%}"] for name, (lm, knn) in PAPER.items()]
    for run in (own, adapted):
        row = run["rows"]["+ kNN"]
        lm, knn = per_word(row["lm"], run), per_word(row["mixture"], run)
        name = f"ours, {run['scored']}, {run['entries']:,} entries"
        paper.append([name, f"{lm:.2f}", f"{knn:.2f}", f"{knn / lm - 1:+.1%}"])
    parts = [
        "## A pre-trained LM of Hugging Face",
        f"{content['about']} Blocks of {block} tokens after {context['context_window']} others. Datastores of "
        f"{own['entries']:,} tokens of {own['scored']} and {adapted['entries']:,} of {adapted['scored']}; everything "
        f"was tuned on the first half of valid, the table is of the second: {own['tokens']:,} tokens, "
        f"{own['words']:,.0f} words of {own['scored']}, {adapted['tokens']:,} tokens, {adapted['words']:,.0f} words of "
        f"{adapted['scored']}.",
        table(header, cells, markdown=True),
        "Beside Table 4 of Xu, Alon and Neubig (2023), of LMs with a datastore of all of WikiText-103 (103 million "
        "tokens). Texts, tokens and sizes are others, so compare the gains and not the numbers:",
        table(["", "LM", "+ kNN", ""], paper, markdown=True),
    ]
    notes = folder / f"{NAME}.notes.md"
    if notes.exists():
        parts.append(notes.read_text().strip())
    write_text(folder / f"{NAME}.md", "\n\n".join(parts) + "\n")
    print("\n" + table(header, cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="?", help="of run.sh")
    parser.add_argument("--out", help="where the page and its JSON file go (default: WORK/results)")
    parser.add_argument("--names", nargs=2, default=["Wikipedia", "novels"], help="of the two domains")
    parser.add_argument("--about", default="", help="what model, texts and machine, for the page")
    parser.add_argument("--report", metavar="DIR", help="only write the page from the JSON file there")
    args = parser.parse_args()
    if args.report:
        write_page(Path(args.report))
        return
    if not args.work:
        parser.error("work is needed to measure (--report DIR to write the page again)")
    out = Path(args.out or Path(args.work) / "results")
    make_folder(out)
    write_json(out / f"{NAME}.json", json.loads(to_json(measure(Path(args.work), args.names, args.about))))
    write_page(out)


if __name__ == "__main__":
    sys.exit(main())
