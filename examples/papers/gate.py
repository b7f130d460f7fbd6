"""Weights by context: constant weights, the gate, and the oracle; and what leaving out searches costs.

    python examples/papers/gate.py DATA CHECKPOINT WORK [--datastore DIR] [--heads HEAD,...]

(He et al. 2021 and Drozdov et al. 2022 have lambda by context for one datastore.) Valid is scored once, in two halves:
everything is learnt from the first, the tables are of the second, which nothing was learnt from.
"""

import json
import re

from common import Recipe

from fairseq_knnlm.report.plots import plot

MIXTURES = {"LM + kNN": ["--without", "cache"], "LM + kNN + cache": []}
SHARES = (0.0, 0.25, 0.5, 0.625, 0.75)


def measure(recipe: Recipe) -> dict:
    store = recipe.args.datastore or recipe.datastore()
    recipe.run("knnlm", "build", store, "--index", "auto")
    flags = ["--knn-datastore", store, "--knn-index", "auto", "--knn-k", "all"]
    cache = ["--knn-cache-size", recipe.args.cache_size]
    heads = ["--knn-head", recipe.args.heads] if recipe.args.heads else []
    recipe.args.parts = "2"
    halves = [recipe.save(recipe.work / f"gate-{half}", *flags, *cache, *heads, part=half) for half in (0, 1)]
    mixtures = dict(MIXTURES)
    if heads:
        names = [f"head{number}" for number in range(len(recipe.args.heads.split(",")))]
        left_out = [word for name in names for word in ("--without", name)]
        mixtures = {name: [*without, *left_out] for name, without in MIXTURES.items()}
        mixtures["LM + kNN + cache + heads"] = []
    rows = []
    for number, (label, without) in enumerate(mixtures.items()):
        gate = recipe.work / f"gate{number}.gate"
        words = ["knnlm", "gate", halves[0], "-o", gate, "--report", halves[1], *without, "--json"]
        rows.append({"label": label, **json.loads(recipe.anywhere(recipe.run(*words)))})
    return {"rows": rows, "skip": [skip(recipe, flags, share) for share in SHARES]}


def skip(recipe: Recipe, flags: list, share: float) -> dict:
    """LM + kNN with the gate, without this share of the list visits: perplexity and seconds of the search."""
    left_out = ["--knn-gate-skip", share] if share else []
    gate = ["--knn-gate", recipe.work / "gate0.gate", *left_out]
    context = ["--gen-subset", "valid", "--num-shards", "2", "--shard-id", "1"]
    printed = recipe.eval_lm(*context, *flags, *gate)
    numbers = {name: float(re.search(pattern, printed)[1]) for name, pattern in PRINTED.items()}
    return {"share": share, **numbers}


PRINTED = {"perplexity": r"mixture perplexity ([\d.]+)", "search_seconds": r"search ([\d.]+)s"}


def main() -> None:
    options = [
        (("--datastore",), {"help": "of train, with an index auto (default: one that is made in WORK)"}),
        (("--cache-size",), {"default": "1000", "help": "tokens (default: %(default)s)"}),
        (("--heads",), {"help": "learned heads to mix in, too"}),
    ]
    recipe = Recipe("gate", __doc__, *options)
    result = recipe.measured(measure)
    cells = []
    for row in result["rows"]:
        values = row["results"]["valid, report"]
        saved = 1 - values["gate"] / values["constant"]
        numbers = [f"{values[name]:.2f}" for name in ("lm", "constant", "gate", "oracle")]
        cells.append([row["label"], *numbers, f"{saved:.1%}"])
    tokens = result["rows"][0]["results"]["valid, report"]["tokens"]
    first = result["skip"][0]["perplexity"]
    skips = [
        [f"{row['share']:.1%}", f"{row['perplexity']:.2f}", f"{row['perplexity'] / first - 1:+.2%}",
         f"{row['search_seconds']:.1f}"]
        for row in result["skip"]
    ]  # fmt: skip
    plot(
        recipe.out / "gate.svg", [row["share"] for row in result["skip"]],
        {"LM + kNN, gate": [row["perplexity"] for row in result["skip"]]}, "share of list visits left out",
        "perplexity (per token)", title="Leaving out list visits", settings=f"{tokens:,} tokens of valid",
    )  # fmt: skip
    recipe.write_page(
        "Weights by context",
        f"Perplexity over {tokens:,} tokens, the second half of the validation split; the constant weights were tuned "
        "and the gate was trained on the first half. The second table leaves out list visits, decided before any list "
        "is read.",
        [
            (["", "LM", "constant weights", "gate", "oracle", "gained"], cells),
            (["visits left out", "perplexity", "change", "search, s"], skips),
        ],
        ["gate.svg"],
    )


if __name__ == "__main__":
    main()
