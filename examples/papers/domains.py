"""An LM in its own domain with its own datastore, and an LM of another domain adapted by that datastore's text.

    python examples/papers/domains.py DATA CHECKPOINT WORK --foreign CHECKPOINT2

(kNN-LM, Tables 2 and 4, Figure 5.) CHECKPOINT was trained on DATA's train, CHECKPOINT2 on text of another domain, with
the same dictionary. Each LM makes its own datastore of DATA's train: keys of different LMs do not compare. Weights and
temperature are tuned on the first part of valid; all numbers are of the second.
"""

from common import Recipe, training_facts, tuned_temperature

from fairseq_knnlm.report.plots import plot

PAPER = {"in domain": (14.75, 14.20), "adapted": (37.13, 24.85)}  # dev perplexity on books: LM, + kNN


def measure(recipe: Recipe) -> dict:
    result = {}
    for name, path in {"in domain": recipe.args.checkpoint, "adapted": recipe.args.foreign}.items():
        folder = name.replace(" ", "-")
        store = recipe.dump(recipe.work / f"datastore-{folder}", path=path)
        recipe.run("knnlm", "build", store, "--index", "auto")
        flags = ["--knn-datastore", store, "--knn-preset", "paper", "--knn-index", "auto"]
        first, second = (
            recipe.save(recipe.work / f"domains-{folder}-{part}", *flags, part=part, path=path) for part in (0, 1)
        )
        tuned = recipe.tune(first, second)
        curve = recipe.sweep(second, "lambda", *tuned_temperature(tuned))
        result[name] = {"training": training_facts(path), **tuned, "lambda": curve}
    return result


def main() -> None:
    option = (("--foreign",), {"metavar": "CHECKPOINT2", "help": "of an LM of another domain, same dictionary"})
    recipe = Recipe("domains", __doc__, option)
    result = recipe.measured(measure)
    labels = {"in domain": "LM of the domain", "adapted": "LM of another domain"}
    cells, curves = [], {}
    for name, row in result.items():
        alone, with_knn = (f"{value:.2f}" for value in PAPER[name])
        cells.append([labels[name], f"{row['lm']:.2f}", alone, "", "", ""])
        cells.append([
            f"{labels[name]} + kNN", f"{row['mixture']:.2f}", with_knn, f"{row['oracle']:.2f}",
            f"{row['hit_rate']:.3f}", f"`{row['flags']}`",
        ])  # fmt: skip
        curves[labels[name]] = [point["mixture"] for point in row["lambda"]]
    weights = [point["lambda"] for point in result["in domain"]["lambda"]]
    plot(
        recipe.out / "domains.svg", weights, curves, "lambda (weight of the datastore)", "perplexity (per token)",
        title="Perplexity over lambda", settings=f"{result['in domain']['tokens']:,} tokens of valid; temperature "
        "tuned on others; each LM with its own datastore of the same text",
    )  # fmt: skip
    points = [[f"{weight:g}", *(f"{curve[i]:.2f}" for curve in curves.values())] for i, weight in enumerate(weights)]
    recipe.write_page(
        "In domain, and adapted by the datastore alone (kNN-LM Tables 2 and 4, Figure 5)",
        f"Perplexity over {result['in domain']['tokens']:,} tokens of the validation split; lambda and temperature "
        "were tuned on other tokens of it (in the second table the temperature alone). The paper's numbers are of its "
        "dev set of books, with an LM of 0.7B tokens of books and one of 3B tokens of Wikipedia.",
        [
            (["", "ours", "paper", "oracle", "hit rate", "tuned flags"], cells),
            (["lambda", *(f"{label} + kNN" for label in curves)], points),
        ],
        ["domains.svg"],
    )


if __name__ == "__main__":
    main()
