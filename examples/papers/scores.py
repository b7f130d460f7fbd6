"""Exact or approximate neighbours, exact or approximate scores, over temperature.

    python examples/papers/scores.py DATA CHECKPOINT WORK

(Xu et al., Table 3, Figures 4 and 5.) At 5% and 100% of the datastore, with the papers' index. Reads every key for
the exact neighbours, which takes its time: one pass over the keys for one part of valid.
"""

from common import Recipe

from fairseq_knnlm.report.plots import plot

CHOICES = {
    "FAISS mask, FAISS score": ("index", "index"),
    "FAISS mask, real score": ("index", "exact"),
    "real mask, real score": ("exact", "exact"),
}
FRACTIONS = ("0.05", "1")
TEMPERATURES = "0.1,0.2,0.3,0.5,0.7,1,1.5,2,3,5,10,20"


def measure(recipe: Recipe) -> list[dict]:
    rows = []
    for fraction in FRACTIONS:
        store = recipe.datastore(fraction)
        for name, (mask, score) in CHOICES.items():
            flags = ["--knn-datastore", store, "--knn-preset", "paper", "--knn-mask", mask, "--knn-score", score]
            save = recipe.save(recipe.work / f"scores-{fraction}-{mask}-{score}", *flags)
            for row in recipe.sweep(save, "temperature", "--values", TEMPERATURES, "--best-lambda"):
                rows.append({"fraction": fraction, "choice": name, **row})
    return rows


def main() -> None:
    recipe = Recipe("scores", __doc__)
    rows = recipe.measured(measure)
    temperatures = sorted({row["temperature"] for row in rows})
    header, cells, curves = ["datastore", "choice", *(f"T = {t:g}" for t in temperatures)], [], {}
    for fraction in FRACTIONS:
        for name in CHOICES:
            found = [row for row in rows if (row["fraction"], row["choice"]) == (fraction, name)]
            perplexities = [row["mixture"] for row in found]
            curves[f"{name}, {float(fraction):.0%}"] = perplexities
            best = min(perplexities)
            shown = [f"**{value:.2f}**" if value == best else f"{value:.2f}" for value in perplexities]
            cells.append([f"{float(fraction):.0%}", name, *shown])
    curves["LM alone"] = [rows[0]["lm"]] * len(temperatures)
    plot(
        recipe.out / "scores.svg", temperatures, curves, "temperature (in units of the squared distance)",
        "perplexity (per token)", log_x=True, title="Exact and approximate neighbours and scores",
        settings=f"{rows[0]['tokens']:,} tokens of valid; k 1024; lambda at its best for each point",
    )  # fmt: skip
    recipe.write_page(
        "Exact and approximate neighbours and scores (Xu et al. Table 3, Figures 4 and 5)",
        f"Perplexity over {rows[0]['tokens']:,} tokens of the validation split (LM alone {rows[0]['lm']:.2f}), "
        "k = 1024, lambda at its best for each number, so these are validation results.",
        [(header, cells)],
        ["scores.svg"],
    )


if __name__ == "__main__":
    main()
