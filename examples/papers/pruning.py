"""Which entries does a datastore need? Perplexity over the share of the entries that each method keeps.

    python examples/papers/pruning.py DATA CHECKPOINT WORK [--datastore DIR] [--methods random,average]

(He et al. 2020, whose lesson it is; He et al. 2021, Table 3.) Valid is scored with every pruned datastore, with every
visited entry, in two halves: lambda and temperature are tuned on the first, the table is of the second. A method whose
name ends in -steps prunes to the largest share first, then the result to the next one, and so on: each step has an
index of what is left, in whose lists there are more entries to merge with. A pruned datastore is removed once both
halves are scored and no step needs it, unless --keep-datastores is given.
"""

import json
import shutil
from pathlib import Path

from common import Recipe

from fairseq_knnlm.report.plots import plot

LISTS, FAR = 32, 64  # visited, the default of --knn-nprobe
MORE_LISTS = "all entries, more lists"
VARIANTS = {
    "random": ("random",),
    "merge": ("merge",),
    "merge-32": ("merge", "--neighbors", "32"),
    "merge-unweighted": ("merge", "--no-weights"),
    "average": ("average",),
    "average-steps": ("average",),
    "retrieved": ("retrieved",),
    "learned": ("learned",),
    "learned-unweighted": ("learned", "--no-weights"),
}
METHODS = "random,merge,average,average-steps,retrieved,learned"
FRACTIONS = "0.01,0.05,0.1,0.25,0.5"


def saves(recipe: Recipe, name: str, store: Path, *flags: object) -> tuple[Path, Path]:
    """Both halves of valid, scored with a datastore."""
    recipe.args.parts = "2"
    folders = [recipe.work / f"pruning-{name}-{half}" for half in (0, 1)]
    for half, folder in enumerate(folders):
        recipe.save(folder, "--knn-datastore", store, "--knn-index", "auto", *flags, part=half)
    return folders[0], folders[1]


def result(recipe: Recipe, name: str, store: Path, *flags: object) -> dict:
    """Of the second half of valid, tuned on the first."""
    folders = saves(recipe, name, store, *flags)
    facts = json.loads((folders[1] / "run.json").read_text())["memories"][0]
    return {"entries": facts["identity"]["entries"], **recipe.tune(*folders)}


def is_scored(recipe: Recipe, name: str) -> bool:
    return all((recipe.work / f"pruning-{name}-{half}" / "run.json").exists() for half in (0, 1))


def measure_method(recipe: Recipe, method: str, whole: Path, fractions: list[float]) -> list[dict]:
    """A method at every share, the largest first."""
    rows, stores, in_steps = [], [], method.endswith("-steps")
    names = [f"{method}-{fraction:g}" for fraction in fractions]
    for place, (name, fraction) in enumerate(zip(names, fractions)):
        source, share = (stores[-1], fractions[place - 1]) if in_steps and stores else (whole, 1.0)
        store = recipe.work / f"pruned-{name}"
        how = ["--keep", f"{fraction / share:g}", "--method", *VARIANTS[method]]
        done = all(is_scored(recipe, other) for other in (names if in_steps else [name]))
        recipe.run("knnlm", "prune", source, *how, "-o", store, done=done)
        rows.append({"method": method, "keep": fraction, **result(recipe, name, store)})
        stores.append(store)
        if not in_steps:
            remove(recipe, stores)
    remove(recipe, stores)
    return rows


def remove(recipe: Recipe, stores: list[Path]) -> None:
    for store in stores:
        if store.exists() and not recipe.args.keep_datastores:
            shutil.rmtree(store)


def measure(recipe: Recipe) -> dict:
    whole = Path(recipe.args.datastore) if recipe.args.datastore else recipe.datastore()
    fractions = sorted(map(float, recipe.args.fractions.split(",")), reverse=True)
    results = {"whole": result(recipe, "whole", whole), "more_lists": [], "pruned": []}
    for fraction in fractions:
        # A list of a pruned datastore stands for more of the text. As much of it is visited with all entries in as many
        # more lists, which takes as much longer, so only for the larger shares.
        if fraction >= 0.25:
            nprobe = round(LISTS / fraction)
            found = result(recipe, f"whole-{nprobe}", whole, "--knn-nprobe", nprobe, "--knn-far", FAR)
            results["more_lists"].append({"method": MORE_LISTS, "keep": fraction, "nprobe": nprobe, **found})
    for method in recipe.args.methods.split(","):
        results["pruned"] += measure_method(recipe, method, whole, fractions)
    return results


def report(recipe: Recipe, results: dict) -> None:
    whole, rows = results["whole"], results["pruned"] + results["more_lists"]
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
        if method != MORE_LISTS
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
        f"tuned on the first half. Each query visits {LISTS} lists; with more lists, as many as it takes to visit as "
        "much of the text as with that share of the entries.",
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
