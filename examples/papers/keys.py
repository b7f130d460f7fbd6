"""Which state of the network is the best key, under L2 distance and inner product?

    python examples/papers/keys.py DATA CHECKPOINT WORK

(kNN-LM, Table 5; Xu et al., Table 1.) Six dumps of the training split; each is removed when it has been scored, so the
disk holds one at a time. Weights and temperature are tuned on the first part of valid, the table is of the second.
"""

import shutil

from common import Recipe

from fairseq_knnlm.report.plots import bar_panels

KEYS = ("ffn_input_ln", "ffn_input", "attn_input_ln", "attn_input", "output_ln", "output")


def measure(recipe: Recipe) -> list[dict]:
    rows = []
    for key in KEYS:
        saves = {
            metric: [recipe.work / f"keys-{key}-{metric}-{part}" for part in (0, 1)] for metric in ("l2", "ip")
        }
        store = recipe.work / f"keys-{key}"
        if not all((folder / "run.json").exists() for folders in saves.values() for folder in folders):
            recipe.dump(store, "--knn-key", key)
        for metric, folders in saves.items():
            flags = ["--knn-datastore", store, "--knn-preset", "paper", "--knn-index", "auto", "--knn-metric", metric]
            tuned, report = (recipe.save(folder, *flags, part=part) for part, folder in enumerate(folders))
            rows.append({"key": key, "metric": metric, **recipe.tune(tuned, report)})
        shutil.rmtree(store, ignore_errors=True)
    return rows


def main() -> None:
    recipe = Recipe("keys", __doc__)
    rows = recipe.measured(measure)
    cells = [
        [
            row["key"], row["metric"], f"{row['lm']:.2f}", f"{row['mixture']:.2f}", f"{row['oracle']:.2f}",
            f"{row['hit_rate']:.3f}", f"{row['effective_neighbors']:.0f}", f"`{row['flags']}`",
        ]
        for row in rows
    ]  # fmt: skip
    header = ["key", "metric", "LM", "kNN-LM", "oracle", "hit rate", "effective neighbours", "tuned flags"]
    labels = [f"{row['key']} {row['metric']}" for row in rows]
    panel = {"key and metric": (labels, [row["mixture"] for row in rows])}
    bar_panels(
        recipe.out / "keys.svg", panel, "perplexity (per token)", baseline=rows[0]["lm"], best="least",
        title="kNN-LM perplexity by key", settings=f"{rows[0]['tokens']:,} tokens of valid; tuned on others",
    )  # fmt: skip
    recipe.write_page(
        "Keys and metrics (kNN-LM Table 5, Xu et al. Table 1)",
        f"Perplexity over {rows[0]['tokens']:,} tokens of the validation split, with lambda, temperature and k tuned "
        "on as many others.",
        [(header, cells)],
        ["keys.svg"],
    )


if __name__ == "__main__":
    main()
