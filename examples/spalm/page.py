"""The page of the SPALM recipe: perplexities, analysis and plots, from what its steps left in WORK.

    python examples/spalm/page.py WORK OUT
    python examples/spalm/page.py --report OUT        # only the page, from OUT/spalm.json

Writes OUT/spalm.json, OUT/spalm.md and copies of the plots; OUT/spalm.notes.md (what a person has to say of it) is put
in the middle.
"""

import json
import math
import re
import shutil
import sys
from pathlib import Path

from fairseq.data import Dictionary

from fairseq_knnlm.data.characters import is_character_level
from fairseq_knnlm.report.tables import table

PLOTS = {
    "gates-histogram.svg": "Values of the gate",
    "gates-map.svg": "The gate over a sequence",
    "k.svg": "Neighbours read",
    "neighbors.svg": "How often the token is among its neighbours",
    "gains.svg": "Tokens that gain and lose most often",
}


class Steps:
    """What the steps of the recipe printed."""

    def __init__(self, work: Path):
        self.work = work

    def find(self, step: str, pattern: str) -> str:
        found = re.findall(pattern, (self.work / "logs" / f"{step}.log").read_text())
        if not found:
            sys.exit(f"error: the log of {step} in {self.work} has no {pattern}; delete its .done and run it again")
        return found[-1]

    def done(self, step: str) -> bool:
        return (self.work / "logs" / f"{step}.done").exists()

    def tuned(self, model: str) -> dict:
        return json.loads(self.find(f"tune-{model}", r'\{"flags".*\}'))

    def trained(self, model: str) -> dict:
        log = f"train-{model}"
        return {
            "parameters": int(self.find(log, r"num. shared model params: ([\d,]+)").replace(",", "")),
            "updates": int(self.find(log, r"num_updates[=:]? ?(\d+)")),
        }

    def analysis(self, name: str) -> dict:
        return json.loads((self.work / "analysis" / f"{name}.json").read_text())


def collect(steps: Steps) -> dict:
    rows = []
    for model in ("transformer", "xl", "spalm"):
        perplexity = float(steps.find(f"score-{model}", r"Perplexity: ([\d.]+)"))
        rows.append({"model": model, "perplexity": perplexity, **steps.trained(model)})
        if steps.done(f"tune-{model}"):
            tuned = steps.tuned(model)
            report = tuned["results"]["valid, report"]
            rows.append({"model": f"{model} + kNN", "flags": tuned["flags"], "perplexity": report["mixture"], **report})
    gates, gains = steps.analysis("gates"), steps.analysis("gains")
    return {
        "of_characters": is_character_level(Dictionary.load(str(steps.work / "bin/dict.txt"))),
        "tokens": next(row["tokens"] for row in rows if "tokens" in row),
        "entries": json.loads((steps.work / "keys-train/manifest.json").read_text())["entries"],
        "rows": rows,
        "k": steps.analysis("k"),
        "gate": {name: gates[name] for name in ("tokens", "mean", "counts")},
        "gains": {which: {**gains[which], "rows": gains[which]["rows"][:12]} for which in ("better", "worse")},
        "first_neighbour": steps.analysis("neighbors")["shares"],
        "neighbours": steps.analysis("neighbors")["rows"][:8],
        "search_seconds_per_million": float(
            steps.find("neighbors-train", r"([\d,]+) processor seconds for a million").replace(",", "")
        ),
        "throughput": json.loads(steps.find("throughput", r'\{"Transformer-XL".*\}')),
        "plots": [name for name in PLOTS if (steps.work / "analysis" / name).exists()],  # no token may have gained
    }


NAMES = {
    "transformer": "Transformer",
    "xl": "Transformer-XL",
    "xl + kNN": "kNN-LM (Transformer-XL + kNN)",
    "spalm": "SPALM",
    "spalm + kNN": "SPALM + kNN",
}


def page(results: dict, notes: str) -> str:
    compared = [
        [
            NAMES[row["model"]], f"{row['parameters']:,}" if "parameters" in row else "",
            f"{row['updates']:,}" if "updates" in row else "", f"`{row['flags']}`" if "flags" in row else "",
            *_perplexity(row, results),
        ]
        for row in results["rows"]
    ]  # fmt: skip
    by_k = [[str(row["k"]), f"{row['perplexity']:.2f}"] for row in results["k"]["rows"]]
    gained = [
        [*(f"{row[name]:.2f}" for name in ("spalm", "xl", "transformer")), _cell(row["context"]), _cell(row["token"])]
        for row in results["gains"]["better"]["rows"]
    ]
    near = [
        [_cell(row["token"]), *(_cell(neighbor["token"]) for neighbor in row["neighbors"][:4])]
        for row in results["neighbours"]
    ]
    shares, seconds, speed = results["first_neighbour"], results["search_seconds_per_million"], results["throughput"]
    counts = {which: results["gains"][which]["count"] for which in ("better", "worse")}
    parts = [
        "## SPALM (Yogatama et al. 2021, Table 2 and section 5)",
        f"Perplexity over {results['tokens']:,} tokens, the second half of the validation split; the kNN flags were "
        f"tuned on the first half. Three networks of the same layers, trained from scratch for the same number of "
        f"updates on the same {results['entries']:,} tokens; the Transformer is also the frozen LM whose keys choose "
        "the neighbours that SPALM reads.",
        table(["", "parameters", "updates", "tuned flags", *_perplexity_header(results)], compared, markdown=True),
        notes,
        f"Searching the neighbours of train took {seconds:,.0f} processor seconds for a million tokens, which at the "
        f"same cost is {110 * seconds / 3600:,.1f} processor hours for the paper's 110 million. SPALM trains at "
        f"{speed['ratio']:.2f} of the Transformer-XL's speed ({speed['SPALM']:,.0f} and {speed['Transformer-XL']:,.0f} "
        "tokens per processor second, in turns on the same batches).",
        f"Neighbours read at test time, by the network that was trained with K = {results['k']['trained_k']}, "
        f"{results['k']['tokens']:,} tokens:",
        table(["K", "perplexity"], by_k, markdown=True),
        f"The first neighbour is the token itself at {shares[0]:.1%} of the positions of valid, one of the first four "
        f"at {shares[3]:.1%}. From the middle of valid:",
        table(["token", "1", "2", "3", "4"], near, markdown=True),
        f"SPALM gives {counts['better']:,} tokens a probability that is higher by more than 0.1 than both the "
        f"Transformer-XL's and the Transformer's, and {counts['worse']:,} one that is lower. The largest gains:",
        table(["SPALM", "XL", "Transformer", "context", "token"], gained, markdown=True),
        *(f"![{PLOTS[name]}](spalm-{name})" for name in results["plots"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _perplexity_header(results: dict) -> list[str]:
    return ["perplexity", *(["bits per character"] if results["of_characters"] else [])]


def _perplexity(row: dict, results: dict) -> list[str]:
    bits = [f"{math.log2(row['perplexity']):.3f}"] if results["of_characters"] else []
    return [f"{row['perplexity']:.2f}", *bits]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    work, out = sys.argv[1], Path(sys.argv[2])
    if work == "--report":
        results = json.loads((out / "spalm.json").read_text())
    else:
        out.mkdir(parents=True, exist_ok=True)
        results = collect(Steps(Path(work)))
        (out / "spalm.json").write_text(json.dumps(results, indent=1) + "\n")
        for name in results["plots"]:
            shutil.copy(Path(work) / "analysis" / name, out / f"spalm-{name}")
    notes = out / "spalm.notes.md"
    (out / "spalm.md").write_text(page(results, notes.read_text().strip() if notes.exists() else ""))
    lines = [[NAMES[row["model"]], *_perplexity(row, results)] for row in results["rows"]]
    header = ["second half of valid", *_perplexity_header(results)]
    print("\n" + table(header, lines, left=("second half of valid",)))


if __name__ == "__main__":
    main()
