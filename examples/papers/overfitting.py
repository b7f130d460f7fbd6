"""Is a datastore only a text learnt by heart? An LM, the same LM trained on without dropout, and a datastore.

    python examples/papers/overfitting.py DATA WORK [--tokens 100000] [--longer 900]

(Xu et al., Table 9.) The LM is trained on a small text, then on the same text without dropout until it knows it. The
mixture's weight is tuned on the first part of valid; all numbers but those of train are of the second.
"""

from common import Recipe, lm_perplexity
from small_lms import CONTEXT, OPTIONS, PLACES, SmallLMs

KNN = ["--knn-k", "1024"]
WITHOUT_DROPOUT = [
    "--dropout", "0", "--attention-dropout", "0", "--lr", "0.001", "--reset-optimizer", "--reset-lr-scheduler",
    "--reset-dataloader", "--reset-meters",
]  # fmt: skip


def measure(recipe: Recipe) -> dict:
    lms, longer = SmallLMs(recipe), int(recipe.args.longer)
    paths = {"LM": lms.train("seed-1", "--seed", "1")}
    more = ["--restore-file", paths["LM"], *WITHOUT_DROPOUT]
    paths["trained on without dropout"] = lms.train("by-heart", *more, updates=longer)
    saves, train = {}, {}
    for number, (name, path) in enumerate(paths.items()):
        saves[name] = lms.saves(f"overfitting-{number}", path)
        known = lms.folder / f"overfitting-train-{number}"
        done = (known / "run.json").exists()
        recipe.eval_lm("--gen-subset", "train", "--knn-save", known, data=lms.data, path=path, done=done)
        train[name] = lm_perplexity(known)
    store = lms.datastore(paths["LM"])
    return {
        "train": train,
        "valid": {name: lm_perplexity(report) for name, (_, report) in saves.items()},
        "mixed": recipe.mix(*zip(*saves.values())),
        "knn": recipe.tune(*lms.saves("overfitting-knn", paths["LM"], "--knn-datastore", store, *KNN)),
        "trained": f"{lms.facts()}; without dropout {longer} more",
    }


def main() -> None:
    option = (("--longer",), {"default": "900", "help": "updates without dropout (default: %(default)s)"})
    recipe = Recipe("overfitting", __doc__, option, *OPTIONS, places=PLACES, context=CONTEXT)
    result = recipe.measured(measure)
    cells = [[name, f"{result['train'][name]:.2f}", f"{result['valid'][name]:.2f}", ""] for name in result["train"]]
    weight = f"weight {result['mixed']['weights'][1]:.3f}"
    cells.append(["mixture of both", "", f"{result['mixed']['mixture']:.2f}", weight])
    cells.append(["LM + kNN", "", f"{result['knn']['mixture']:.2f}", f"`{result['knn']['flags']}`"])
    recipe.write_page(
        "A text learnt by heart (Xu et al., Table 9)",
        f"Perplexity over the training text and over {result['knn']['tokens']:,} tokens of the validation split, tuned "
        f"on others of it. {result['trained']}. The datastore holds the LM's keys of the same text.",
        [(["", "train", "valid", "tuned"], cells)],
        [],
    )


if __name__ == "__main__":
    main()
