"""How compact may keys be? Perplexity, bytes and variance kept over dimensions and bits.

    python examples/papers/compact.py DATA CHECKPOINT WORK [--datastore DIR] [--forms 128xint8,64xint8]

Each form is made of the same datastore with knnlm compact and searched with the default flags. All of valid is scored
in two halves: lambda and temperature are tuned on the first, the table is of the second. A compact datastore is removed
once both halves are scored, unless --keep-datastores is given.
"""

import json
import shutil
from pathlib import Path

from common import Recipe

FORMS = "256xint8,128xint8,64xint8,32xint8"


def facts_of(recipe: Recipe, store: Path) -> dict:
    """What knnlm info says of keys, values and the index."""
    info = json.loads(recipe.run("knnlm", "info", store, "--json"))
    auto = next(index for index in info["indexes"] if index["name"] == "auto")
    projection = info["projection"] or {}
    return {"dim": info["dim"], "dtype": info["key_dtype"], "variance_kept": projection.get("variance_kept"),
            "store_bytes": info["bytes"] / info["entries"], "index_bytes": auto["bytes_on_disk"] / info["entries"],
            "entries": info["entries"]}  # fmt: skip


def scored(recipe: Recipe, name: str, store: Path) -> dict:
    """Of the second half of valid, tuned on the first; and what the datastore takes."""
    recipe.run("knnlm", "build", store, "--index", "auto")
    folders = [recipe.work / f"compact-{name}-{half}" for half in (0, 1)]
    for half, folder in enumerate(folders):
        recipe.save(folder, "--knn-datastore", store, "--knn-index", "auto", part=half)
    return {"form": name, **facts_of(recipe, store), **recipe.tune(*folders)}


def measure(recipe: Recipe) -> list[dict]:
    recipe.args.parts = "2"
    whole = Path(recipe.args.datastore) if recipe.args.datastore else recipe.datastore()
    rows = [scored(recipe, "whole", whole)]
    for form in recipe.args.forms.split(","):
        dim, dtype = form.split("x")
        store = recipe.work / f"compact-{form}"
        recipe.run("knnlm", "compact", whole, "--dim", dim, "--dtype", dtype, "-o", store)
        rows.append(scored(recipe, form, store))
        if not recipe.args.keep_datastores:
            shutil.rmtree(store)
    return rows


def report(recipe: Recipe, rows: list[dict]) -> None:
    whole, cells = rows[0], []
    for row in rows:
        kept, form = row["variance_kept"], f"{row['dim']} x {row['dtype']}"
        cells.append([
            form, "" if kept is None else f"{kept:.1%}", f"{row['store_bytes']:,.0f}", f"{row['index_bytes']:,.0f}",
            f"{row['mixture']:.2f}", f"{row['mixture'] / whole['mixture'] - 1:+.2%}", f"`{row['flags']}`",
        ])  # fmt: skip
    recipe.write_page(
        "Compact keys",
        f"Perplexity over {whole['tokens']:,} tokens, the second half of the validation split (LM alone "
        f"{whole['lm']:.2f}), with {whole['entries']:,} entries and the default search; lambda and temperature were "
        "tuned on the first half. Bytes are for one entry; `knnlm build --drop-keys` leaves those of the index alone "
        "and two for the value.",
        [(["keys", "variance kept", "bytes of the datastore", "bytes of the index", "perplexity", "change",
           "tuned flags"], cells)],
        [],
    )  # fmt: skip


def main() -> None:
    options = (
        (("--datastore",), {"help": "of train (default: WORK/datastore)"}),
        (("--forms",), {"default": FORMS, "help": "dimensions x dtype (default: %(default)s)"}),
        (("--keep-datastores",), {"action": "store_true", "help": "do not remove the compact datastores"}),
    )
    recipe = Recipe("compact", __doc__, *options)
    report(recipe, recipe.measured(measure))


if __name__ == "__main__":
    main()
