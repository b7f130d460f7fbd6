"""Number of neighbours, lambda in and out of domain, size of the datastore.

    python examples/papers/curves.py DATA CHECKPOINT WORK [--other DATA2]

(kNN-LM, Figures 4, 5 and 2.) DATA2 is text of another domain, binarised with the same dictionary: the LM is adapted to
it by a datastore of its training split. Everything but lambda is tuned on the first part of valid; the curves are of
the second.
"""

from pathlib import Path

from common import Recipe, tuned_temperature

from fairseq_knnlm.report.plots import plot

FRACTIONS = ("0.05", "0.1", "0.25", "0.5", "1")


def saves(recipe: Recipe, name: str, store: Path, data: str | None = None) -> tuple[Path, Path]:
    """One part of valid to tune on, another to report."""
    flags = ["--knn-datastore", store, "--knn-preset", "paper", "--knn-index", "auto"]
    first, second = (recipe.save(recipe.work / f"{name}-{part}", *flags, part=part, data=data) for part in (0, 1))
    return first, second


def measure(recipe: Recipe) -> dict:
    sizes = []
    for fraction in FRACTIONS:
        store = recipe.datastore(fraction)
        first, second = saves(recipe, f"curves-{fraction}", store)
        sizes.append({"fraction": float(fraction), **recipe.tune(first, second)})
    results = {"size": sizes, "k": recipe.sweep(second, "k", "--best-lambda", *tuned_temperature(sizes[-1]))}
    results["lambda"] = {"in domain": recipe.sweep(second, "lambda", *tuned_temperature(sizes[-1]))}
    if recipe.args.other:
        other = recipe.dump(recipe.work / "datastore-other", data=recipe.args.other)
        choices = {"out of domain, its own datastore": other, "out of domain, the LM's datastore": recipe.datastore()}
        for name, store in choices.items():
            first, second = saves(recipe, f"curves-other-{store.name}", store, recipe.args.other)
            temperature = tuned_temperature(recipe.tune(first, second))
            results["lambda"][name] = recipe.sweep(second, "lambda", *temperature)
    return results


def main() -> None:
    recipe = Recipe("curves", __doc__, (("--other",), {"metavar": "DATA2", "help": "binarised text of another domain"}))
    results = recipe.measured(measure)
    k, sizes, weights = results["k"], results["size"], results["lambda"]
    plot(
        recipe.out / "curves-k.svg", [row["k"] for row in k],
        {"kNN-LM": [row["mixture"] for row in k], "LM alone": [row["lm"] for row in k]},
        "k (neighbours per token)", "perplexity (per token)", title="Perplexity over k", powers_of_two=True,
        settings=f"{k[0]['tokens']:,} tokens of valid; lambda at its best for each k; temperature tuned on others",
    )  # fmt: skip
    plot(
        recipe.out / "curves-size.svg", [row["fraction"] for row in sizes],
        {"kNN-LM": [row["mixture"] for row in sizes], "LM alone": [row["lm"] for row in sizes]},
        "part of the datastore (1: all of it)", "perplexity (per token)", title="Perplexity over the datastore's size",
        settings=f"{sizes[0]['tokens']:,} tokens of valid; lambda, temperature and k tuned on others for each size",
    )  # fmt: skip
    plot(
        recipe.out / "curves-lambda.svg", [row["lambda"] for row in weights["in domain"]],
        {name: [row["mixture"] / row["lm"] for row in rows] for name, rows in weights.items()},
        "lambda (weight of the datastore)", "perplexity / that of the LM alone",
        title="Perplexity over lambda, in and out of domain",
        settings=f"{weights['in domain'][0]['tokens']:,} tokens of valid; temperature tuned on others",
    )  # fmt: skip
    text = ["perplexity", "oracle", "hit rate", "effective neighbours"]
    k_rows = [[str(row["k"]), f"{row['weights'][0]:.2f}", *_cells(row)] for row in k]
    size_rows = [[f"{row['fraction']:.0%}", *_cells(row), f"`{row['flags']}`"] for row in sizes]
    weight_rows = [
        [f"{rows[0]['lambda']:g}", *(f"{row['mixture']:.2f}" for row in rows)] for rows in zip(*weights.values())
    ]
    recipe.write_page(
        "Neighbours, size of the datastore, lambda (kNN-LM Figures 4, 2 and 5)",
        f"Over {k[0]['tokens']:,} tokens of the validation split; LM alone {k[0]['lm']:.2f}. Temperature tuned on as "
        "many other tokens; lambda too in the second table, and at its best for each k in the first.",
        [
            (["k", "best lambda", *text], k_rows),
            (["datastore", *text, "tuned flags"], size_rows),
            (["lambda", *weights], weight_rows),
        ],
        ["curves-k.svg", "curves-size.svg", "curves-lambda.svg"],
    )


def _cells(row: dict) -> list[str]:
    perplexities = [f"{row['mixture']:.2f}", f"{row['oracle']:.2f}"]
    return [*perplexities, f"{row['hit_rate']:.3f}", f"{row['effective_neighbors']:.0f}"]


if __name__ == "__main__":
    main()
