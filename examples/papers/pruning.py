"""Which entries does a datastore need? Perplexity over the share of the entries that each method keeps.

    python examples/papers/pruning.py DATA CHECKPOINT WORK [--datastore DIR] [--methods random,average]

(He et al. 2020, whose lesson it is; He et al. 2021, Table 3.) Valid is scored with every pruned datastore, with every
visited entry, in two halves: lambda and temperature are tuned on the first, the table is of the second. A pruned
datastore is removed once both halves are scored, unless --keep-datastores is given.
"""

import json
import shutil
from pathlib import Path

from common import Recipe

from fairseq_knnlm.report.plots import plot

VARIANTS = {
    "random": ("random",),
    "merge": ("merge",),
    "merge-32": ("merge", "--neighbors", "32"),
    "merge-unweighted": ("merge", "--no-weights"),
    "average": ("average",),
    "retrieved": ("retrieved",),
    "learned": ("learned",),
    "learned-unweighted": ("learned", "--no-weights"),
}
METHODS = "random,merge,average,retrieved,learned"
FRACTIONS = "0.01,0.05,0.1,0.25,0.5"


def saves(recipe: Recipe, name: str, store: Path) -> tuple[Path, Path]:
    """Both halves of valid, scored with a datastore."""
    recipe.args.parts = "2"
    folders = [recipe.work / f"pruning-{name}-{half}" for half in (0, 1)]
    for half, folder in enumerate(folders):
        recipe.save(folder, "--knn-datastore", store, "--knn-index", "auto", part=half)
    return folders[0], folders[1]


def result(recipe: Recipe, name: str, store: Path) -> dict:
    """Of the second half of valid, tuned on the first."""
    folders = saves(recipe, name, store)
    facts = json.loads((folders[1] / "run.json").read_text())["memories"][0]
    return {"entries": facts["identity"]["entries"], **recipe.tune(*folders)}


def measure(recipe: Recipe) -> dict:
    whole = Path(recipe.args.datastore) if recipe.args.datastore else recipe.datastore()
    results = {"whole": result(recipe, "whole", whole), "pruned": []}
    for method in recipe.args.methods.split(","):
        for fraction in recipe.args.fractions.split(","):
            name = f"{method}-{fraction}"
            store = recipe.work / f"pruned-{name}"
            done = all((recipe.work / f"pruning-{name}-{half}" / "run.json").exists() for half in (0, 1))
            words = ["knnlm", "prune", whole, "--keep", fraction, "--method", *VARIANTS[method], "-o", store]
            recipe.run(*words, done=done)
            results["pruned"].append({"method": method, "keep": float(fraction), **result(recipe, name, store)})
            if not recipe.args.keep_datastores and store.exists():
                shutil.rmtree(store)
    return results


def report(recipe: Recipe, results: dict) -> None:
    whole, rows = results["whole"], results["pruned"]
    fractions = sorted({row["keep"] for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows))
    found = {(row["method"], row["keep"]): row for row in rows}
    cells = [["LM alone", *[""] * len(fractions), f"{whole['lm']:.2f}"]]
    for method in methods:
        own = [found.get((method, fraction)) for fraction in fractions]
        cells.append([method, *("" if row is None else f"{row['mixture']:.2f}" for row in own), ""])
    cells.append(["all entries", *[""] * len(fractions), f"{whole['mixture']:.2f}"])
    lost = []
    for method in methods:
        own = [found.get((method, fraction)) for fraction in fractions]
        changes = ["" if row is None else f"{row['mixture'] / whole['mixture'] - 1:+.1%}" for row in own]
        flags = "" if own[-1] is None else f"`{own[-1]['flags']}`"
        lost.append([method, *changes, flags])
    curves = {
        method: [row["mixture"] for row in sorted(rows, key=lambda row: row["keep"]) if row["method"] == method]
        for method in methods
    }
    places = {method: sorted(row["keep"] for row in rows if row["method"] == method) for method in methods}
    for name, level in (("LM alone", whole["lm"]), ("all entries", whole["mixture"])):
        curves[name], places[name] = [level] * 2, [fractions[0], fractions[-1]]
    plot(
        recipe.out / "pruning.svg", places, curves, "share of the entries that is kept", "perplexity", log_x=True,
        title="Which entries does a datastore need?", settings=f"{whole['entries']:,} entries, tuned", mark_best=False,
    )  # fmt: skip
    shares = [f"{fraction:.0%}" for fraction in fractions]
    recipe.write_page(
        "Which entries a datastore needs",
        f"Perplexity over {whole['tokens']:,} tokens, the second half of the validation split, with a share of the "
        f"{whole['entries']:,} entries, and how much that is more than with all of them; lambda and temperature were "
        "tuned on the first half.",
        [(["", *shares, "all or none"], cells), (["", *shares, "tuned flags of the last"], lost)],
        ["pruning.svg"],
    )


def main() -> None:
    options = (
        (("--datastore",), {"help": "of train, such as one of knnlm compact (default: WORK/datastore)"}),
        (("--methods",), {"default": METHODS, "help": f"some of {', '.join(VARIANTS)} (default: %(default)s)"}),
        (("--fractions",), {"default": FRACTIONS, "help": "of the entries (default: %(default)s)"}),
        (("--keep-datastores",), {"action": "store_true", "help": "do not remove the pruned datastores"}),
    )
    recipe = Recipe("pruning", __doc__, *options)
    report(recipe, recipe.measured(measure))


if __name__ == "__main__":
    main()
