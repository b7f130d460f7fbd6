"""Is it that p_kNN leaves most tokens out? The LM, mixed with itself cut to its k most probable tokens.

    python examples/papers/sparsified.py DATA CHECKPOINT WORK [--datastore DIR]

(Xu et al., appendix E.) What is left is renormalised. The weight is tuned on the first part of valid; all numbers are
of the second. With a datastore its mixture is measured beside them.
"""

import numpy as np
from common import Recipe

from fairseq_knnlm.mixture.interpolation import perplexity
from fairseq_knnlm.saved_runs.scores import SavedScores
from fairseq_knnlm.saved_runs.weights import best_weights, mixture_log_probs


def sparse_log_probs(saved: SavedScores, k: int) -> np.ndarray:
    """log p of the tokens where the LM has its k most probable ones only: (n,), -inf where it is none of them."""
    top = np.concatenate([part.arrays["top.tokens"][:, :k] for part in saved.parts])
    kept = np.concatenate([part.arrays["top.probs"][:, :k].astype(np.float64).sum(axis=1) for part in saved.parts])
    among = (top == saved.tokens[:, None]).any(axis=1)
    return np.where(among, saved.lm - np.log(kept), -np.inf)


def mixed(first: SavedScores, second: SavedScores, k: int) -> dict:
    """The weight that is best for one text, and the perplexity that it gives on the other."""
    weights = best_weights(np.stack([first.lm, sparse_log_probs(first, k)]))
    sparse = sparse_log_probs(second, k)
    mixture = mixture_log_probs(np.stack([second.lm, sparse]), weights)
    return {
        "k": k,
        "among": float(np.isfinite(sparse).mean()),
        "lambda": float(weights[1]),
        "perplexity": perplexity(float(mixture.mean())),
    }


def measure(recipe: Recipe) -> dict:
    ks = [int(k) for k in recipe.args.ks.split(",")]
    flags = ["--knn-save-top", max(ks)]
    if recipe.args.datastore:
        flags += ["--knn-datastore", recipe.args.datastore, "--knn-k", "1024"]
    folders = [recipe.save(recipe.work / f"sparsified-{part}", *flags, part=part) for part in (0, 1)]
    saves = [SavedScores.open([folder]) for folder in folders]
    return {
        "tokens": len(saves[1]),
        "lm": perplexity(float(saves[1].lm.mean())),
        "rows": [mixed(*saves, k) for k in ks],
        "knn": recipe.tune(*folders) if recipe.args.datastore else None,
    }


def main() -> None:
    options = [
        (("--datastore",), {"metavar": "DIR", "help": "of the same LM, to compare with"}),
        (("--ks",), {"default": "1,8,64,1024", "help": "most probable tokens (default: %(default)s)"}),
    ]
    recipe = Recipe("sparsified", __doc__, *options)
    result = recipe.measured(measure)
    cells = [["LM alone", "", f"{result['lm']:.2f}", ""]]
    for row in result["rows"]:
        share, weight = f"{row['among']:.1%}", f"{row['lambda']:.4f}"
        cells.append([f"+ its {row['k']:,} most probable tokens", share, f"{row['perplexity']:.2f}", weight])
    if result["knn"]:
        hits = f"{result['knn']['hit_rate']:.1%}"
        cells.append(["+ kNN", hits, f"{result['knn']['mixture']:.2f}", f"`{result['knn']['flags']}`"])
    recipe.write_page(
        "The LM, sparsified (Xu et al., appendix E)",
        f"Perplexity over {result['tokens']:,} tokens of the validation split, tuned on others of it; and the share of "
        "the tokens that are among the most probable ones, or among the neighbours.",
        [(["", "tokens among them", "perplexity", "lambda"], cells)],
        [],
    )


if __name__ == "__main__":
    main()
