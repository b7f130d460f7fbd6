"""Train on a little, memorise a lot: an LM of a part of a text, with a datastore of all of it, against an LM of it all.

    python examples/papers/scaling.py DATA CHECKPOINT WORK --little CHECKPOINT2

(kNN-LM, Table 3 and Figure 2.) CHECKPOINT was trained on all of DATA's train, CHECKPOINT2 on its first part. Random
parts of the datastore give the curve. Weights and temperature are tuned on the first part of valid; all numbers are of
the second.
"""

from common import Recipe, lm_perplexity, training_facts

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.report.plots import plot

PAPER = {"little": 20.99, "large": 16.11, 1.0: 14.61}  # dev; 100M and 3B tokens of Wikipedia


def measure(recipe: Recipe) -> dict:
    little = recipe.args.little
    large = recipe.save(recipe.work / "scaling-large", part=1)
    whole = recipe.dump(recipe.work / "datastore-little", path=little)
    rows = []
    for fraction in recipe.args.fractions.split(","):
        store = whole if float(fraction) == 1 else recipe.subsample(whole, fraction)
        recipe.run("knnlm", "build", store, "--index", "auto")
        flags = ["--knn-datastore", store, "--knn-preset", "paper", "--knn-index", "auto"]
        saves = [
            recipe.save(recipe.work / f"scaling-{fraction}-{part}", *flags, part=part, path=little) for part in (0, 1)
        ]
        rows.append({"fraction": float(fraction), "entries": len(Datastore(store)), **recipe.tune(*saves)})
    return {
        "training": {"little": training_facts(little), "large": training_facts(recipe.args.checkpoint)},
        "little": rows[0]["lm"],
        "large": lm_perplexity(large),
        "rows": rows,
    }


def main() -> None:
    recipe = Recipe(
        "scaling", __doc__,
        (("--little",), {"metavar": "CHECKPOINT2", "help": "of an LM trained on a part of the text"}),
        (("--fractions",), {"default": "0.05,0.1,0.25,0.5,1", "help": "of the datastore (default: %(default)s)"}),
    )  # fmt: skip
    result = recipe.measured(measure)
    rows = result["rows"]
    curves = {
        "LM of a part + datastore": [row["mixture"] for row in rows],
        "LM of a part": [result["little"]] * len(rows),
        "LM of everything": [result["large"]] * len(rows),
    }
    entries = [row["entries"] for row in rows]
    plot(
        recipe.out / "scaling.svg", entries, curves, "entries of the datastore (tokens)", "perplexity (per token)",
        title="Train on a little, memorise a lot",
        settings=f"{rows[0]['tokens']:,} tokens of valid; lambda and temperature tuned on others for each size",
    )  # fmt: skip
    cells = [
        ["LM of a part", "", f"{result['little']:.2f}", f"{PAPER['little']:.2f}", "", "", ""],
        ["LM of everything", "", f"{result['large']:.2f}", f"{PAPER['large']:.2f}", "", "", ""],
    ]
    for row in rows:
        paper = f"{PAPER[row['fraction']]:.2f}" if row["fraction"] in PAPER else ""
        cells.append([
            f"LM of a part + kNN, {row['fraction']:.0%}", f"{row['entries']:,}", f"{row['mixture']:.2f}", paper,
            f"{row['oracle']:.2f}", f"{row['hit_rate']:.3f}", f"`{row['flags']}`",
        ])  # fmt: skip
    recipe.write_page(
        "Train on a little, memorise a lot (kNN-LM Table 3 and Figure 2)",
        f"Perplexity over {rows[0]['tokens']:,} tokens of the validation split; lambda and temperature were tuned on "
        "other tokens of it. The paper's numbers are of its dev set: 100M and 3B tokens of Wikipedia.",
        [(["", "entries", "ours", "paper", "oracle", "hit rate", "tuned flags"], cells)],
        ["scaling.svg"],
    )


if __name__ == "__main__":
    main()
