"""Few lists exactly and the next ones as Gaussians, or more lists exactly? Perplexity over both.

    python examples/papers/far_field.py DATA CHECKPOINT WORK [--other DATA2] [--datastore DIR] [--other-datastore DIR]

(Xu et al., Equation 4: a sum over the whole datastore, which they call out of reach.) All of valid is scored with every
entry of --knn-nprobe lists, without and with --knn-far more lists, in two halves: lambda and temperature are tuned on
the first, the table is of the second. With --other the same LM also reads DATA2, with a datastore of DATA2's train.
"""

import json
from pathlib import Path

from common import Recipe

from fairseq_knnlm.report.plots import plot

VISITED = "8,16,32"
FAR = "0,64"


def saved(recipe: Recipe, name: str, data: str, store: Path, nprobe: str, far: str) -> tuple[Path, Path]:
    """Both halves of valid, scored with so many lists."""
    lists = ["--knn-k", "all", "--knn-nprobe", nprobe, "--knn-far", far]
    flags = ["--knn-datastore", store, "--knn-index", recipe.args.index, *lists]
    first, second = (recipe.work / f"far-{name}-{nprobe}-{far}-{half}" for half in (0, 1))
    for half, folder in enumerate((first, second)):
        recipe.save(folder, *flags, part=half, data=data)
    return first, second


def measure(recipe: Recipe) -> list[dict]:
    recipe.args.parts = "2"
    whole = Path(recipe.args.datastore) if recipe.args.datastore else recipe.datastore()
    texts = {"the LM's own text": (recipe.args.data, whole)}
    if recipe.args.other:
        other = Path(recipe.args.other_datastore or recipe.work / "datastore-other")
        texts["another text"] = (recipe.args.other, recipe.dump(other, data=recipe.args.other))
    rows = []
    for text, (data, store) in texts.items():
        recipe.run("knnlm", "build", store, "--index", recipe.args.index)
        for nprobe in recipe.args.lists.split(","):
            for far in recipe.args.far.split(","):
                halves = saved(recipe, text.split()[0], data, store, nprobe, far)
                identity = json.loads((halves[1] / "run.json").read_text())["memories"][0]["identity"]
                facts = {"text": text, "nprobe": int(nprobe), "far": int(far), "entries": identity["entries"]}
                rows.append({**facts, **recipe.tune(*halves)})
    return rows


def report(recipe: Recipe, rows: list[dict]) -> None:
    texts = list(dict.fromkeys(row["text"] for row in rows))
    fars = sorted({row["far"] for row in rows})
    lists = sorted({row["nprobe"] for row in rows})
    found = {(row["text"], row["nprobe"], row["far"]): row for row in rows}
    cells, curves, places = [], {}, {}
    for text in texts:
        for nprobe in lists:
            own = [found[text, nprobe, far] for far in fars]
            changes = [f"{row['mixture'] / own[0]['mixture'] - 1:+.2%}" for row in own[1:]]
            flags = f"`{own[-1]['flags']}`"
            cells.append([f"{text}, {own[0]['entries']:,} entries", f"{own[0]['lm']:.2f}", str(nprobe),
                          *(f"{row['mixture']:.2f}" for row in own), *changes, flags])  # fmt: skip
        for far in fars:
            name = f"{text}, {far} far"
            curves[name] = [found[text, nprobe, far]["mixture"] for nprobe in lists]
            places[name] = lists
    plot(
        recipe.out / "far_field.svg", places, curves, "lists that are visited", "perplexity (per token)", log_x=True,
        title="Near lists exactly, the next ones as Gaussians", settings="k = all, tuned", mark_best=False,
    )  # fmt: skip
    tokens = {text: found[text, lists[0], fars[0]]["tokens"] for text in texts}
    recipe.write_page(
        "The far field",
        "Perplexity over the second half of the validation split ("
        + ", ".join(f"{text}: {count:,} tokens" for text, count in tokens.items())
        + "), with every entry of so many visited lists, and with so many more lists that take part as one Gaussian "
        f"each; lambda and temperature were tuned on the first half for each of the {len(rows)} settings.",
        [(["", "LM alone", "lists visited", *(f"{far} far" if far else "none far" for far in fars),
           *(f"change by {far} far" for far in fars[1:]), "tuned flags of the last"], cells)],
        ["far_field.svg"],
    )  # fmt: skip


def main() -> None:
    options = (
        (("--datastore",), {"help": "of DATA's train, such as one of knnlm compact (default: WORK/datastore)"}),
        (("--other",), {"metavar": "DATA2", "help": "another text, binarised with the same dictionary"}),
        (("--other-datastore",), {"metavar": "DIR", "help": "of DATA2's train (default: WORK/datastore-other)"}),
        (("--index",), {"default": "auto", "help": "one that holds the keys (default: %(default)s)"}),
        (("--lists",), {"default": VISITED, "help": "--knn-nprobe (default: %(default)s)"}),
        (("--far",), {"default": FAR, "help": "--knn-far (default: %(default)s)"}),
    )
    recipe = Recipe("far_field", __doc__, *options)
    report(recipe, recipe.measured(measure))


if __name__ == "__main__":
    main()
