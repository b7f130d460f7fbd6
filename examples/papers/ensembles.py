"""Is a kNN-LM only an ensemble? The mean of K LMs, against K - 1 LMs and a datastore.

    python examples/papers/ensembles.py DATA WORK [--lms 3]

(Xu et al., Figure 8 and Table 8.) The LMs differ in their seed. The datastore holds the first one's keys. Everything is
tuned on the first part of valid; all numbers are of the second.
"""

from common import Recipe
from small_lms import CONTEXT, OPTIONS, PLACES, SmallLMs

from fairseq_knnlm.report.plots import plot

KNN = ["--knn-k", "1024"]


def measure(recipe: Recipe) -> dict:
    lms, count = SmallLMs(recipe), int(recipe.args.lms)
    checkpoints = [lms.train(f"seed-{seed}", "--seed", seed) for seed in range(1, count + 1)]
    bare = [lms.saves(f"lm-{seed}", path) for seed, path in enumerate(checkpoints, start=1)]
    store = lms.datastore(checkpoints[0])
    rows = []
    for number in range(1, count + 1):
        path = ":".join(checkpoints[:number])
        knn = recipe.tune(*lms.saves(f"knn-{number}", path, "--knn-datastore", store, *KNN))
        row = {"lms": number, "mean": knn["lm"], "knn": knn["mixture"], "flags": knn["flags"], "tokens": knn["tokens"]}
        if number > 1:
            mixed = recipe.mix(*([saves[part] for saves in bare[:number]] for part in (0, 1)))
            row |= {"weighted": mixed["mixture"], "weights": mixed["weights"]}
        rows.append(row)
    return {"rows": rows, "trained": lms.facts()}


def main() -> None:
    option = (("--lms",), {"default": "3", "help": "how many (default: %(default)s)"})
    recipe = Recipe("ensembles", __doc__, option, *OPTIONS, places=PLACES, context=CONTEXT)
    result = recipe.measured(measure)
    rows = result["rows"]
    cells = []
    for row in rows:
        weighted = f"{row['weighted']:.2f}" if "weighted" in row else ""
        cells.append([str(row["lms"]), f"{row['mean']:.2f}", weighted, f"{row['knn']:.2f}", f"`{row['flags']}`"])
    curves = {"mean of the LMs": [row["mean"] for row in rows], "+ kNN": [row["knn"] for row in rows]}
    plot(
        recipe.out / "ensembles.svg", [row["lms"] for row in rows], curves, "LMs", "perplexity (per token)",
        title="Ensembles with and without a datastore", settings=f"{rows[0]['tokens']:,} tokens; {result['trained']}",
    )  # fmt: skip
    recipe.write_page(
        "Ensembles (Xu et al., Figure 8 and Table 8)",
        f"Perplexity over {rows[0]['tokens']:,} tokens of the validation split, tuned on others of it. "
        f"{result['trained']}, which differ in their seed; the datastore is of the same text, with the keys of the "
        "first LM. Compare a row with the kNN column of the row above it: one LM more, or a datastore?",
        [(["LMs", "mean", "best weights", "mean + kNN", "tuned flags"], cells)],
        ["ensembles.svg"],
    )


if __name__ == "__main__":
    main()
