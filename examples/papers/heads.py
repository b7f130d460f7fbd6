"""Trained parts in the datastore's place: output embeddings, mixtures of softmaxes, clusters, a small network.

    python examples/papers/heads.py DATA CHECKPOINT WORK [--only NAME ...] [--epochs 2] [--fraction 0.25]

(Xu et al., sections 4.1 and 4.2, appendices B and C; the networks are beyond the paper.) Each head is learnt from the
pairs of a datastore of train, stopped on the first tokens of valid, its weight tuned on the first half of valid, and
reported on the second half. att is the state before the last feed-forward layer, ffn the state that the LM's own
softmax sees.
"""

import json
from pathlib import Path

from common import Recipe, lm_perplexity

from benchmarks.command import eval_lm_command, run

KEYS = {"att": "ffn_input_ln", "ffn": "output_ln"}
HEADS = {
    "att 1x": ("att", ["--rows", "1x"]),
    "att 3x": ("att", ["--rows", "3x"]),
    "att 9x": ("att", ["--rows", "9x"]),
    "ffn 1x": ("ffn", ["--rows", "1x"]),
    "ffn 3x": ("ffn", ["--rows", "3x"]),
    "ffn 9x": ("ffn", ["--rows", "9x"]),
    "att 1x, L2": ("att", ["--rows", "1x", "--metric", "l2"]),
    "att 1x, interpolated loss": ("att", ["--rows", "1x", "--interpolated", "TRAIN", "--valid-save", "VALID"]),
    "att 3V by frequency": ("att", ["--rows", "frequency:3"]),
    "att 3V by loss": ("att", ["--rows", "loss:3", "--save", "TRAIN"]),
    "att MoS R = 2": ("att", ["--kind", "mos", "--components", "2"]),
    "att MoS R = 3": ("att", ["--kind", "mos", "--components", "3"]),
    "ffn MoS R = 2, LM's embedding": ("ffn", ["--kind", "mos", "--components", "2", "--embedding", "fixed"]),
    "att clusters 2V": ("att", ["--kind", "clusters", "--rows", "2x"]),
    "att clusters 2V, fine-tuned": ("att", ["--kind", "clusters", "--rows", "2x", "--fine-tune"]),
    "att network": ("att", ["--kind", "network"]),
    "att network, of a part": ("att", ["--kind", "network", "PART"]),
    "att network, of a part, distilled": ("att", ["--kind", "network", "--imitate", "TABLE"]),
}
NEIGHBORS = "32"
SPEED_PARTS = 10  # of valid, one of which is scored for its speed


class HeadRecipe:
    """The datastores, heads and saves of the experiment, each made once."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.work = recipe, recipe.work
        recipe.args.parts = "2"

    def store(self, key: str) -> Path:
        return self.recipe.dump(self.work / ("datastore" if key == "att" else f"datastore-{key}"), *_key(key))

    def valid(self, key: str) -> tuple[Path, int]:
        """A datastore of valid, and how many entries of its first half tell when to stop."""
        folder = self.work / f"valid-{key}"
        done = (folder / "manifest.json").exists() and json.loads((folder / "manifest.json").read_text())["complete"]
        self.recipe.eval_lm("--gen-subset", "valid", "--knn-dump", folder, *_key(key), done=done)
        half = json.loads((folder / "manifest.json").read_text())["entries"] // 2
        return folder, min(half, int(self.recipe.args.stop_tokens))

    def part(self) -> Path:
        """Some entries of the datastore."""
        return self.recipe.subsample(self.store("att"), self.recipe.args.fraction)

    def table(self) -> Path:
        """What the entries of the part find in all of the datastore but near themselves."""
        table = self.work / "heads-neighbors"
        flags = ["--datastore", self.store("att"), "--queries", self.part(), "--k", NEIGHBORS, "-o", table]
        self.recipe.run("knnlm", "neighbors", *flags)
        return table

    def bare_save(self, split: str) -> Path:
        """The LM's loss on every token of a split."""
        folder = self.work / f"heads-{split}-save"
        self.recipe.eval_lm("--gen-subset", split, "--knn-save", folder, done=(folder / "run.json").exists())
        return folder

    def head(self, name: str) -> Path:
        key, flags = HEADS[name]
        folder = self.work / ("head-" + name.replace(" ", "-").replace(",", "").replace("'", ""))
        store, (valid, tokens) = self.store(key), self.valid(key)
        if "PART" in flags or "TABLE" in flags:
            store = self.part()
        flags = [self.table() if word == "TABLE" else word for word in flags if word != "PART"]
        flags = [self.bare_save(word.lower()) if word in ("TRAIN", "VALID") else word for word in flags]
        if "fixed" in flags or key == "ffn":
            flags = [*flags, "--path", self.recipe.args.checkpoint, "--data", self.recipe.args.data]
        if "clusters" not in flags or "--fine-tune" in flags:
            flags = [*flags, "--epochs", self.recipe.args.epochs]
        command = ["knnlm", "learn", "--datastore", store, *flags, "--valid", valid, "--valid-tokens", tokens]
        self.recipe.run(*command, "-o", folder, done=(folder / "head.json").exists())
        return folder

    def saves(self, name: str, *flags: object) -> list[Path]:
        """Both halves of valid, scored with some memories."""
        folders = [self.work / f"heads-{name}-{half}" for half in (0, 1)]
        return [self.recipe.save(folder, *flags, part=half) for half, folder in enumerate(folders)]

    def speed(self, *flags: object) -> float:
        """Tokens that are scored in a second with some memories, over a small part of valid."""
        context = {name: getattr(self.recipe.args, name) for name in ("tokens_per_sample", "context_window")}
        part = ["--gen-subset", "valid", "--num-shards", SPEED_PARTS, "--shard-id", 0]
        command = eval_lm_command(self.recipe.args.data, self.recipe.args.checkpoint, *part, *flags, **context)
        self.recipe.run(*command, done=True)
        return run(*command)["tokens_per_second"]


def _key(key: str) -> list[str]:
    return ["--knn-key", KEYS[key]]


def folder_bytes(folder: Path, pattern: str = "*.npy") -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


def measure(recipe: Recipe) -> dict:
    made = HeadRecipe(recipe)
    store = made.store("att")
    recipe.run("knnlm", "build", store, "--index", "auto")
    knn = ["--knn-datastore", store]
    halves = made.saves("knn", *knn)
    result = {"lm": lm_perplexity(halves[1]), "knn": {**recipe.tune(*halves), "bytes": folder_bytes(store)}}
    result |= {"epochs": int(recipe.args.epochs), "fraction": float(recipe.args.fraction)}
    names = recipe.args.only or list(HEADS)
    heads = {name: made.head(name) for name in names}
    result["rows"] = {}
    for name, head in heads.items():
        halves = made.saves(head.name, *mixed(head))
        result["rows"][name] = {**recipe.tune(*halves), **facts(head)}
    if "att 1x" in heads:
        result["both"] = recipe.tune(*made.saves("knn-and-head", *knn, *mixed(heads["att 1x"])))
    # Speeds come last and one after the other, when nothing else of the recipe is left to do.
    result["lm_speed"] = made.speed()
    result["knn"]["tokens_per_second"] = made.speed(*knn)
    for name, head in heads.items():
        result["rows"][name]["tokens_per_second"] = made.speed(*mixed(head))
    return result


def mixed(head: Path) -> list:
    """The flag that mixes a head in."""
    return ["--knn-head", head]


def facts(head: Path) -> dict:
    """What a head takes: bytes, rows, steps of training."""
    written = json.loads((head / "head.json").read_text())
    steps = written["training"].get("kept_step", 0)
    return {"bytes": folder_bytes(head), "rows": written["row_count"], "steps": steps}


def main() -> None:
    options = (
        (("--only",), {"nargs": "+", "choices": list(HEADS), "metavar": "NAME", "help": "some of the heads"}),
        (("--epochs",), {"default": "2", "help": "passes over the datastore (default: %(default)s)"}),
        (("--stop-tokens",), {"default": "20000", "help": "of valid, that tell when to stop (default: %(default)s)"}),
        (("--fraction",), {"default": "0.25", "help": "of the datastore, that is a part (default: %(default)s)"}),
    )
    recipe = Recipe("heads", __doc__, *options)
    result = recipe.measured(measure)
    lm, knn = result["lm"], result["knn"]
    tokens = knn["tokens"]

    def cells(name: str, row: dict) -> list[str]:
        gain = (lm - row["mixture"]) / (lm - knn["mixture"])
        size = f"{row['bytes'] / 1e6:,.0f} MB" if "bytes" in row else ""
        speed = f"{row['tokens_per_second']:,.0f}" if "tokens_per_second" in row else ""
        rows = f"{row['rows']:,}" if "rows" in row else ""
        weights = row["flags"].replace("--knn-", "")
        return [name, f"{row['mixture']:.2f}", f"{gain:.0%}", f"{row['oracle']:.2f}", rows, size, speed, f"`{weights}`"]

    table = [["LM", f"{lm:.2f}", "", "", "", "", f"{result['lm_speed']:,.0f}", ""], cells("+ kNN (att)", knn)]
    table += [cells(f"+ {name}", row) for name, row in result["rows"].items()]
    if "both" in result:
        table.append(cells("+ kNN + att 1x", result["both"]))
    recipe.write_page(
        "Trained parts in the datastore's place (Xu et al. section 4, appendices B and C)",
        f"Perplexity over {tokens:,} tokens, the second half of the validation split; training was stopped and every "
        f"weight tuned on the first half. Passes over the entries in training: {result['epochs']} at most; a part is "
        f"{result['fraction']:.0%} of all entries. The size of kNN is that of its keys and values, without the index.",
        [(["", "perplexity", "share of kNN's gain", "oracle", "rows", "size", "tokens/s", "tuned flags"], table)],
        [],
    )


if __name__ == "__main__":
    main()
