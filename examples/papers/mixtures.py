"""Something else in the datastore's place: an n-gram LM of the same text, or an LM that has learnt it by heart.

    python examples/papers/mixtures.py DATA CHECKPOINT WORK [--memorised CHECKPOINT2]

(kNN-LM, Figures 7 and 8.) The LM is mixed with a Kneser-Ney n-gram LM of DATA's train, with a datastore of it, and with
CHECKPOINT2, an LM that was trained on it without dropout for as long as it learnt. The weight is tuned on the first
part of valid; all numbers are of the second.
"""

from pathlib import Path

import numpy as np
from common import Recipe
from fairseq.data import Dictionary, data_utils
from ngram import MAX_ORDER, KneserNey

from fairseq_knnlm.report.plots import plot
from fairseq_knnlm.saved_runs.scores import SavedScores

WEIGHTS = np.linspace(0, 0.95, 20)


def perplexities(lm: np.ndarray, other: np.ndarray) -> list[float]:
    """Of the mixture at each weight: log-probabilities (n,), (n,)."""
    with np.errstate(divide="ignore"):
        logs = [np.logaddexp(lm + np.log1p(-weight), other + np.log(weight)) for weight in WEIGHTS]
    return [float(np.exp(-log_probs.mean())) for log_probs in logs]


def tuned(first: tuple, second: tuple) -> dict:
    """Two models' log-probabilities of the first and of the second part: the weight that is best for the first."""
    weight = int(np.argmin(perplexities(*first)))
    curve = perplexities(*second)
    alone = float(np.exp(-second[1].mean()))
    return {"alone": alone, "lambda": float(WEIGHTS[weight]), "mixture": curve[weight], "curve": curve}


def read_split(data: Path, split: str) -> tuple[np.ndarray, int]:
    """All tokens of a split, and the size of the vocabulary."""
    dictionary = Dictionary.load(str(data / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(data / split), dictionary)
    return np.concatenate([line.numpy() for line in lines]), len(dictionary)


def measure(recipe: Recipe) -> dict:
    data = Path(recipe.args.data)
    saves = [SavedScores.open([recipe.save(recipe.work / f"mixtures-lm-{part}", part=part)]) for part in (0, 1)]
    train, vocabulary_size = read_split(data, "train")
    valid, _ = read_split(data, "valid")
    rows = {}
    for order in range(2, MAX_ORDER + 1):
        log_probs = KneserNey(train, order, vocabulary_size).log_probs(valid)
        parts = [(save.lm, log_probs[save.run.start : save.run.stop]) for save in saves]
        rows[f"{order}-gram LM"] = tuned(*parts)
    if recipe.args.memorised:
        others = [
            SavedScores.open([recipe.save(recipe.work / f"mixtures-memorised-{part}", part=part, path=path)])
            for part, path in enumerate([recipe.args.memorised] * 2)
        ]
        rows["LM without dropout"] = tuned(*((save.lm, other.lm) for save, other in zip(saves, others)))
    store = recipe.datastore()
    recipe.run("knnlm", "build", store, "--index", "auto")
    flags = ["--knn-datastore", store, "--knn-preset", "paper", "--knn-index", "auto"]
    knn = recipe.tune(*(recipe.save(recipe.work / f"mixtures-knn-{part}", *flags, part=part) for part in (0, 1)))
    return {"lm": float(np.exp(-saves[1].lm.mean())), "tokens": len(saves[1]), "rows": rows, "knn": knn}


def main() -> None:
    option = (("--memorised",), {"metavar": "CHECKPOINT2", "help": "of an LM trained without dropout"})
    recipe = Recipe("mixtures", __doc__, option)
    result = recipe.measured(measure)
    cells = [["LM alone", "", f"{result['lm']:.2f}", ""]]
    for name, row in result["rows"].items():
        cells.append([f"+ {name}", f"{row['alone']:.2f}", f"{row['mixture']:.2f}", f"{row['lambda']:.2f}"])
    cells.append(["+ kNN, k = 1024", "", f"{result['knn']['mixture']:.2f}", f"`{result['knn']['flags']}`"])
    curves = {name: row["curve"] for name, row in result["rows"].items()}
    plot(
        recipe.out / "mixtures.svg", [round(float(w), 2) for w in WEIGHTS], curves, "lambda (weight of the other LM)",
        "perplexity (per token)", title="Something else in the datastore's place",
        settings=f"{result['tokens']:,} tokens of valid; LM alone {result['lm']:.2f}",
    )  # fmt: skip
    recipe.write_page(
        "Something else in the datastore's place (kNN-LM Figures 7 and 8)",
        f"Perplexity over {result['tokens']:,} tokens of the validation split; the weight was tuned on other tokens of "
        "it. The n-gram LMs have interpolated Kneser-Ney smoothing and know the text that the datastore is of.",
        [(["", "alone", "mixture", "lambda"], cells)],
        ["mixtures.svg"],
    )


if __name__ == "__main__":
    main()
