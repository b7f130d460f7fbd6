"""Where does retrieval help? The gain by frequency, length and bigram entropy of the target.

    python examples/papers/where.py DATA CHECKPOINT WORK [--save DIR]

(Xu et al., appendix D.) The gain is the mean of log p_kNN-LM - log p_LM over the tokens of a bucket. Counts are of the
training text, whose tokens are the values of the datastore, in order:

- frequency: of the target;
- length: of the target, in characters;
- forward entropy: of the word that follows, given the word before the target (how open the place is);
- backward entropy: of the word before, given the target (how many contexts it is used in).
"""

from pathlib import Path

import numpy as np
from common import Recipe
from fairseq.data import Dictionary

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.report.plots import bar_panels
from fairseq_knnlm.saved_runs.scores import SavedScores
from fairseq_knnlm.saved_runs.settings import memory_scores, stack
from fairseq_knnlm.saved_runs.tuning import tune
from fairseq_knnlm.saved_runs.weights import mixture_log_probs

FREQUENCIES = [0, 1, 10, 100, 1_000, 10_000, 100_000]
LENGTHS = [1, 2, 3, 5, 7, 9, 12]
ENTROPIES = [0, 1, 2, 3, 4, 5, 6, 7, 8]


def bigram_entropy(first: np.ndarray, second: np.ndarray, types: int) -> np.ndarray:
    """Entropy in nats of ``second`` given each type of ``first``: (n,), (n,) -> (types,)."""
    pairs, counts = np.unique(first.astype(np.int64) * types + second, return_counts=True)
    given = pairs // types
    totals = np.bincount(given, weights=counts, minlength=types)
    sums = np.bincount(given, weights=counts * np.log(counts), minlength=types)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(np.log(totals) - sums / totals)


def buckets(values: np.ndarray, gains: np.ndarray, edges: list[float]) -> list[dict]:
    """Mean gain and share of the tokens in [edge, next edge)."""
    number = np.digitize(values, edges) - 1
    rows = []
    for place, edge in enumerate(edges):
        inside = gains[number == place]
        if len(inside):
            upper = edges[place + 1] if place + 1 < len(edges) else None
            rows.append({"from": edge, "to": upper, "share": len(inside) / len(gains), "gain": float(inside.mean())})
    return rows


def measure(recipe: Recipe) -> dict:
    store = recipe.datastore()
    save = Path(recipe.args.save) if recipe.args.save else None
    if save is None:
        flags = ["--knn-datastore", store, "--knn-preset", "paper", "--knn-index", "auto"]
        save = recipe.save(recipe.work / "where", *flags)
    saved = SavedScores.open([save])
    settings = tune(saved)
    mixture = mixture_log_probs(
        stack(saved, memory_scores(saved, settings)), np.array([1 - sum(settings.weights), *settings.weights])
    )
    gains, targets = mixture - saved.lm, saved.tokens
    dictionary = Dictionary.load(str(Path(recipe.args.data) / "dict.txt"))
    text, types = Datastore(store).values, len(dictionary)
    forward, backward = bigram_entropy(text[:-1], text[1:], types), bigram_entropy(text[1:], text[:-1], types)
    before = np.concatenate([[dictionary.eos()], targets[:-1]])
    return {
        "tokens": len(targets),
        "flags": settings.flags(saved),
        "gain": float(gains.mean()),
        "helped": float((gains > 0).mean()),
        "frequency in the training text": buckets(np.bincount(text, minlength=types)[targets], gains, FREQUENCIES),
        "length in characters": buckets(np.array([len(dictionary[t]) for t in targets]), gains, LENGTHS),
        "forward bigram entropy": buckets(forward[before], gains, ENTROPIES),
        "backward bigram entropy": buckets(backward[targets], gains, ENTROPIES),
    }


def label(bucket: dict) -> str:
    return f"{bucket['from']:,}+" if bucket["to"] is None else f"{bucket['from']:,}"


def main() -> None:
    option = (("--save",), {"metavar": "DIR", "help": "a save to look at (default: make one)"})
    recipe = Recipe("where", __doc__, option)
    result = recipe.measured(measure)
    properties = {name: rows for name, rows in result.items() if isinstance(rows, list)}
    panels = {name: ([label(row) for row in rows], [row["gain"] for row in rows]) for name, rows in properties.items()}
    settings = f"{result['tokens']:,} tokens of valid; {result['flags']}; {result['gain']:+.3f} nats overall"
    bar_panels(
        recipe.out / "where.svg", panels, "mean gain (nats)", title="Where retrieval helps", settings=settings,
        best="most",
    )  # fmt: skip
    tables = []
    for name, rows in properties.items():
        cells = [[label(row), f"{row['share']:.1%}", f"{row['gain']:+.3f}"] for row in rows]
        tables.append(([f"{name}, from", "tokens", "gain in nats"], cells))
    recipe.write_page(
        "Where retrieval helps (Xu et al., appendix D)",
        f"Mean of log p_kNN-LM - log p_LM over {result['tokens']:,} tokens of the validation split, tuned on the same "
        f"(`{result['flags']}`): {result['gain']:+.3f} overall; {result['helped']:.1%} of the tokens gain. A bucket "
        "reaches from its number to the next row's.",
        tables,
        ["where.svg"],
    )


if __name__ == "__main__":
    main()
