"""What each memory adds: LM, + kNN, + continuous cache, + both.

    python examples/papers/memories.py DATA CHECKPOINT WORK [--cache-size 3000]

(kNN-LM, Table 1.) Valid is scored once, in two halves: everything is tuned on the first, the table is of the second.
"""

from common import Recipe

ROWS = {"+ kNN": ["--without", "cache"], "+ cache": ["--without", "knn0"], "+ kNN + cache": []}


def measure(recipe: Recipe) -> list[dict]:
    store = recipe.datastore()
    flags = ["--knn-datastore", store, "--knn-preset", "paper", "--knn-index", "auto"]
    flags += ["--knn-cache-size", recipe.args.cache_size]
    recipe.args.parts = "2"
    halves = [recipe.save(recipe.work / f"memories-{half}", *flags, part=half) for half in (0, 1)]
    return [{"label": label, **recipe.tune(*halves, *without)} for label, without in ROWS.items()]


def main() -> None:
    option = (("--cache-size",), {"default": "3000", "help": "tokens (default: %(default)s)"})
    recipe = Recipe("memories", __doc__, option)
    rows = recipe.measured(measure)
    cells = [["LM", "", f"{rows[0]['lm']:.2f}", "", ""]]
    for row in rows:
        hits = "" if row["hit_rate"] is None else f"{row['hit_rate']:.3f}"
        cells.append([row["label"], f"`{row['flags']}`", f"{row['mixture']:.2f}", f"{row['oracle']:.2f}", hits])
    recipe.write_page(
        "What each memory adds (kNN-LM Table 1)",
        f"Perplexity over {rows[0]['tokens']:,} tokens, the second half of the validation split; everything was tuned "
        "on the first half.",
        [(["", "tuned flags", "perplexity", "oracle", "hit rate"], cells)],
        [],
    )


if __name__ == "__main__":
    main()
