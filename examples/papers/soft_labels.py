"""Are soft labels what helps? LMs that learn from what an LM, its neighbours, or both say of each training token.

    python examples/papers/soft_labels.py DATA WORK [--weight 0.5]

(Xu et al., appendix E.) The labels are of an LM with another seed, and of its datastore of the same text, in which no
token finds itself. All LMs are trained from scratch for as long.
"""

from common import Recipe, lm_perplexity
from small_lms import CONTEXT, OPTIONS, PLACES, SmallLMs

TOP, NEIGHBORS = 32, 32


def measure(recipe: Recipe) -> dict:
    lms = SmallLMs(recipe)
    teacher = lms.train("seed-1", "--seed", "1")
    store, table, top = lms.datastore(teacher), lms.folder / "neighbors", lms.folder / "top"
    again = [*("--gen-subset", "train"), "--knn-save", top, "--knn-save-top", TOP]
    recipe.eval_lm(*again, data=lms.data, path=teacher, done=(top / "run.json").exists())
    done = (lms.folder / "neighbors.done").exists()
    recipe.run("knnlm", "neighbors", "--datastore", store, "--queries", store, "-o", table, "--k", NEIGHBORS, done=done)
    (lms.folder / "neighbors.done").touch()
    lm, knn = ["--soft-labels", top], ["--soft-neighbors", table]
    students = {"the token": None, "+ the LM": lm, "+ its neighbours": knn, "+ both, lambda 0.25": [*lm, *knn]}
    rows = []
    for number, (label, flags) in enumerate(students.items()):
        if flags is None:
            path = lms.train("seed-2", "--seed", "2")
        else:
            soft = ["--soft-weight", recipe.args.weight, *flags]
            path = lms.train(f"student-{number}-{recipe.args.weight}", "--seed", "2", *soft, soft=True)
        save = lms.save(f"soft-{number}-{recipe.args.weight}", path, part=1)
        rows.append({"label": label, "perplexity": lm_perplexity(save)})
    taught = lm_perplexity(lms.save("lm-1", teacher, part=1))
    return {"rows": rows, "teacher": taught, "weight": float(recipe.args.weight), "trained": lms.facts()}


def main() -> None:
    option = (("--weight",), {"default": "0.5", "help": "share of the loss with the labels (default: %(default)s)"})
    recipe = Recipe("soft_labels", __doc__, option, *OPTIONS, places=PLACES, context=CONTEXT)
    result = recipe.measured(measure)
    cells = [[row["label"], f"{row['perplexity']:.2f}"] for row in result["rows"]]
    recipe.write_page(
        "Soft labels (Xu et al., appendix E)",
        f"Perplexity over a part of the validation split. {result['trained']}, from scratch, with the same seed; "
        f"{result['weight']:g} of the loss is the cross-entropy with labels. The labels are the {TOP} most probable "
        f"tokens of an LM with another seed (perplexity {result['teacher']:.2f}), and its {NEIGHBORS} neighbours.",
        [(["learns from", "perplexity"], cells)],
        [],
    )


if __name__ == "__main__":
    main()
