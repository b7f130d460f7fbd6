"""Where in the text does retrieval help? The gain by place in the context window and in the document.

    python examples/papers/places.py DATA CHECKPOINT WORK [--save DIR] [--boundary LINE]

(Xu et al., appendix E.) The gain is the mean of log p_kNN-LM - log p_LM over the tokens of a bucket. A block's first
token sees --context-window tokens before it, its last one a block more. Documents begin with the lines of --boundary.
"""

from pathlib import Path

import numpy as np
from common import Recipe
from fairseq.data import Dictionary, data_utils
from where import buckets, label

from fairseq_knnlm.data.text_encoding import DictionaryText
from fairseq_knnlm.memory.opening import find_documents
from fairseq_knnlm.report.plots import bar_panels
from fairseq_knnlm.saved_runs.scores import SavedScores
from fairseq_knnlm.saved_runs.settings import memory_scores, stack
from fairseq_knnlm.saved_runs.tuning import tune
from fairseq_knnlm.saved_runs.weights import mixture_log_probs

STEPS = 8  # of a block
IN_DOCUMENT = [0, 64, 128, 256, 512, 1024, 2048, 4096]


def with_loss(values: np.ndarray, gains: np.ndarray, lm: np.ndarray, edges: list[int]) -> list[dict]:
    """Buckets with the mean gain and the LM's mean loss, both in nats."""
    losses = buckets(values, -lm, edges)
    return [{**row, "loss": loss["gain"]} for row, loss in zip(buckets(values, gains, edges), losses)]


def measure(recipe: Recipe) -> dict:
    save = Path(recipe.args.save) if recipe.args.save else None
    if save is None:
        store = recipe.datastore()
        save = recipe.save(recipe.work / "places", "--knn-datastore", store, "--knn-k", "1024", "--knn-index", "auto")
    saved = SavedScores.open([save])
    settings = tune(saved)
    weights = np.array([1 - sum(settings.weights), *settings.weights])
    gains = mixture_log_probs(stack(saved, memory_scores(saved, settings)), weights) - saved.lm
    source, positions = saved.run.source, np.arange(saved.run.start, saved.run.stop)
    block = source["tokens_per_sample"] - source["context_window"]
    dictionary = Dictionary.load(str(Path(recipe.args.data) / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(Path(recipe.args.data) / "valid"), dictionary)
    documents = find_documents(lines, dictionary, DictionaryText(dictionary), recipe.args.boundary)
    edges = sorted({block * step // STEPS for step in range(STEPS)})
    return {
        "tokens": len(saved),
        "flags": settings.flags(saved),
        "gain": float(gains.mean()),
        "context_window": source["context_window"],
        "place in the block": with_loss(positions % block, gains, saved.lm, edges),
        "place in the document": with_loss(positions - documents.start_of(positions), gains, saved.lm, IN_DOCUMENT),
    }


def main() -> None:
    options = [
        (("--save",), {"metavar": "DIR", "help": "a save to look at (default: make one)"}),
        (("--boundary",), {"default": "re:= [^=]+ =", "help": "as --knn-cache-boundary (default: %(default)s)"}),
    ]
    recipe = Recipe("places", __doc__, *options)
    result = recipe.measured(measure)
    places = {name: rows for name, rows in result.items() if isinstance(rows, list)}
    panels = {name: ([label(row) for row in rows], [row["gain"] for row in rows]) for name, rows in places.items()}
    settings = f"{result['tokens']:,} tokens of valid; {result['flags']}; {result['gain']:+.3f} nats overall"
    bar_panels(
        recipe.out / "places.svg", panels, "mean gain (nats)", title="Where in the text retrieval helps",
        settings=settings, best="most",
    )  # fmt: skip
    tables = []
    for name, rows in places.items():
        cells = [[label(row), f"{row['share']:.1%}", f"{row['loss']:.3f}", f"{row['gain']:+.3f}"] for row in rows]
        tables.append(([f"{name}, from", "tokens", "LM's loss in nats", "gain in nats"], cells))
    recipe.write_page(
        "Where in the text retrieval helps (Xu et al., appendix E)",
        f"Mean of log p_kNN-LM - log p_LM over {result['tokens']:,} tokens of the validation split, tuned on the same "
        f"(`{result['flags']}`): {result['gain']:+.3f} overall. Each block sees {result['context_window']} tokens "
        "before its first one. A bucket reaches from its number to the next row's.",
        tables,
        ["places.svg"],
    )


if __name__ == "__main__":
    main()
