"""Sparse prototypes (He et al. 2020): an LM, the dense editor and sparse ones, on short sentences.

    python examples/prototypes/run.py WORK --train FILE[,FILE...] --valid FILE[,FILE...] [--size toy]
    python examples/prototypes/run.py WORK --sentences DIR

Makes sentences (sentences.py), binarises them, trains a small LM for their embeddings (or takes --encoder), then the
models: the decoder alone (LM), once for as long as the editors and once for twice as long, the editor with a uniform
prior (dense), the editor with a Dirichlet prior at each of --alphas (sparse). All are scored on the same test
sentences. What is done is not done again, and a training that was interrupted goes on from its last checkpoint. toy
takes minutes, full an hour or two.
"""

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "papers"))

from common import REPOSITORY, Recipe

SIZES = {
    # sentences, held out, words of the vocabulary, epochs of the LM and of the editors, dims, and what is scored
    "toy": {
        "count": 2000, "held_out": 200, "words": 2000, "lm_epochs": 3, "epochs": 4, "embed": 48, "hidden": 64,
        "edit": 16, "kappa": 15, "batch": 32, "warmup": 100, "scored": 100, "top": 10, "rest": 10, "samples": 3,
        "timed": 2,
    },
    "full": {
        "count": 20000, "held_out": 1000, "words": 8000, "lm_epochs": 5, "epochs": 6, "embed": 128, "hidden": 256,
        "edit": 50, "kappa": 30, "batch": 64, "warmup": 1000, "scored": 500, "top": 20, "rest": 30, "samples": 5,
        "timed": 3,
    },
}  # fmt: skip
PLUGIN = ["--user-dir", REPOSITORY / "fairseq_knnlm"]
QUIET = ["--no-progress-bar", "--num-workers", "0", "--no-epoch-checkpoints", "--optimizer", "adam", "--seed", "1"]


class Prototypes:
    """The steps of the experiment, each done once."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.work, args = recipe, recipe.work, recipe.args
        self.size = dict(SIZES[args.size])
        for name in ("count", "epochs"):
            self.size[name] = int(getattr(args, name) or self.size[name])
        self.text, self.data, self.embeddings = self.work / "text", self.work / "bin", self.work / "embeddings"
        if args.sentences:
            self.text = Path(args.sentences)
            with open(self.text / "train.txt", encoding="utf-8") as file:
                self.size["count"] = sum(1 for _ in file)

    def prepare(self) -> None:
        args, size = self.recipe.args, self.size
        if not args.sentences:
            script = Path(__file__).resolve().parent / "sentences.py"
            words = ["--train", args.train, "--valid", args.valid]
            words += ["--count", size["count"], "--held-out", size["held_out"]]
            self.recipe.run("python", script, self.text, *words, done=(self.text / "train.txt").exists())
        names = ("train", "valid", "test")
        splits = [word for split in names for word in (f"--{split}pref", self.text / f"{split}.txt")]
        flags = ["--only-source", *splits, "--destdir", self.data, "--nwordssrc", size["words"]]
        self.recipe.run("fairseq-preprocess", *flags, done=(self.data / "test.idx").exists())
        source = ["--encoder", args.encoder] if args.encoder else ["--path", self.embedding_lm()]
        for split in names:
            folder = self.embeddings / split
            flags = ["--data", self.data, *source, "--split", split, "-o", folder]
            self.recipe.run("knnlm", "embed", *flags, done=(folder / "embeddings.json").exists())

    def embedding_lm(self) -> Path:
        """A small LM whose states are the embeddings."""
        size = self.size
        return self.train(
            "embedding-lm", "--task", "knn_language_modeling", "--arch", "transformer_lm", "--decoder-layers", 2,
            "--decoder-embed-dim", 2 * size["embed"], "--decoder-ffn-embed-dim", 4 * size["embed"],
            "--decoder-attention-heads", 4, "--decoder-normalize-before", "--share-decoder-input-output-embed",
            "--sample-break-mode", "eos", "--tokens-per-sample", 64, "--max-tokens", 2048, "--dropout", 0.1,
            "--lr", 0.002, "--max-epoch", size["lm_epochs"],
        )  # fmt: skip

    def train(self, name: str, *flags: object) -> Path:
        """A model; its best checkpoint."""
        folder = self.work / "models" / name
        command = ["fairseq-train", self.data, *PLUGIN, *QUIET, *flags, "--save-dir", folder]
        finished = folder / "finished"
        self.recipe.run(*command, done=finished.exists())
        finished.touch()
        return folder / "checkpoint_best.pt"

    def editor(self, name: str, *flags: object) -> Path:
        size = self.size
        return self.train(
            name, "--task", "sparse_prototypes", "--arch", self.recipe.args.arch, "--criterion", "prototype_elbo",
            "--embeddings", self.embeddings, "--embed-dim", size["embed"], "--hidden-dim", size["hidden"],
            "--edit-dim", size["edit"], "--edit-kappa", size["kappa"], "--batch-size", size["batch"], "--lr", 0.001,
            "--clip-norm", 5, "--prototype-warmup", size["warmup"], "--max-epoch", size["epochs"], *flags,
        )  # fmt: skip

    def ask(self, name: str, what: str, model: Path, *flags: object) -> dict:
        """What a command of ``knnlm prototypes`` says, kept in a file."""
        file = self.work / "answers" / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        place = ["--path", model, "--data", self.data, "--embeddings", self.embeddings, "--split", "test", "--json"]
        answer = self.recipe.run("knnlm", "prototypes", what, *place, *flags, done=file.exists())
        if answer:
            file.write_text(answer)
        return json.loads(file.read_text())

    def measure(self, name: str, model: Path, sparse: bool) -> dict:
        """Perplexity with all prototypes and with fewer; test time of the sum over those that are kept."""
        size, kept = self.size, "active" if sparse else "all"
        scoring = ["--sentences", size["scored"], "--top", size["top"], "--rest", size["rest"]]
        scoring += ["--samples", size["samples"]]
        pruned = ["--prune-num", f"all,active,{max(1, size['count'] // 100)},1"] if sparse else []
        result = self.ask(f"{name}-score", "evaluate", model, *scoring, *pruned)
        # A sum over all of the dense editor's prototypes takes seconds for a sentence, so it is timed on a few: the
        # same ones for every model, because time grows with length.
        exact = ["--top", "all", "--samples", 1, "--sentences", size["timed"], "--prune-num", kept]
        words = self.ask(f"{name}-words", "active", model, "--show", 5)
        return {**result, "exact": self.ask(f"{name}-exact", "evaluate", model, *exact)["rows"][0], "words": words}


def train_all(made: Prototypes, flags: dict[str, tuple[object, ...]]) -> dict[str, Path]:
    """Models by name, several at once with one thread each: a small network gains little from a second thread."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        with ThreadPoolExecutor(made.recipe.args.jobs) as pool:
            return dict(zip(flags, pool.map(lambda name: made.editor(name, *flags[name]), flags)))
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def measure(recipe: Recipe) -> dict:
    made, alphas = Prototypes(recipe), recipe.args.alphas.split(",")
    made.prepare()
    models = train_all(made, {
        "lm": ("--prototype-prior", "none"),
        # An editor reads two prototypes for each sentence of a batch, so its decoder learns from each sentence twice.
        "lm-long": ("--prototype-prior", "none", "--max-epoch", 2 * made.size["epochs"]),
        "dense": ("--prototype-prior", "uniform"),
        **{f"sparse-{alpha}": ("--prototype-alpha", alpha) for alpha in alphas},
    })  # fmt: skip
    scored = ["--sentences", made.size["scored"]]
    rows = {"LM": made.ask("lm-score", "evaluate", models["lm"], *scored)}
    rows["LM, twice the epochs"] = made.ask("lm-long-score", "evaluate", models["lm-long"], *scored)
    rows["dense editor"] = made.measure("dense", models["dense"], sparse=False)
    for alpha in alphas:
        name = f"sparse-{alpha}"
        rows[f"sparse editor, alpha {alpha}"] = made.measure(name, models[name], sparse=True)
    return {"text": recipe.args.text, "size": made.size, "rows": rows}


def main() -> None:
    options = (
        (("--train",), {"help": "tokenised text, plain or gzipped: files separated by commas"}),
        (("--valid",), {"help": "text of other documents"}),
        (("--sentences",), {"help": "instead: a folder with train.txt, valid.txt and test.txt, a sentence to a line"}),
        (("--size",), {"choices": list(SIZES), "default": "full"}),
        (("--count",), {"help": "sentences of train (default: 20000, toy 2000)"}),
        (("--epochs",), {"help": "of each editor (default: 6, toy 4)"}),
        (("--alphas",), {"default": "0.1,0.2,0.3", "help": "of the sparse editors (default: %(default)s)"}),
        (("--arch",), {"default": "sparse_editor", "help": "or sparse_editor_transformer"}),
        (("--jobs",), {"type": int, "default": 2, "help": "models that are trained at once (default: %(default)s)"}),
        (("--text",), {"default": "sentences", "help": "what the sentences are of, for the title of the page"}),
        (("--name",), {"default": "prototypes", "help": "of the page and its JSON file (default: %(default)s)"}),
        (("--encoder",), {"help": "folder of a sentence encoder, instead of a small LM that is trained first"}),
    )
    recipe = Recipe("prototypes", __doc__, *options, places=("work",))
    recipe.name = recipe.args.name
    if not recipe.args.report:
        check_text(recipe.args)
    result = recipe.measured(measure)
    size, rows = result["size"], result["rows"]
    recipe.write_page(
        f"Sparse prototypes (He et al. 2020): {result['text']}",
        f"{size['count']:,} training sentences, each of them a prototype; perplexity of "
        f"{rows['LM']['sentences']:,} test sentences of other documents ({rows['LM']['tokens']:,} tokens, ends "
        f"included) by importance weighting: {size['top']} prototypes by q(t|x), {size['rest']} others, "
        f"{size['samples']} edit vectors for each. Active prototypes are the fewest that hold 90% of the mass that "
        "sentences gave. The time of a test sentence is that of the sum over all prototypes that are kept: all of the "
        "dense editor's, the active ones of the sparse editors'.",
        [table_of_models(rows), table_of_words(rows)],
        [],
    )


def check_text(args: argparse.Namespace) -> None:
    if bool(args.train and args.valid) == bool(args.sentences):
        sys.exit(
            "error: --train and --valid, or else --sentences, are needed to measure (--report --out DIR to write the "
            "page again)"
        )
    splits = [Path(args.sentences) / f"{split}.txt" for split in ("train", "valid", "test")] if args.sentences else []
    if missing := [str(path) for path in splits if not path.is_file()]:
        sys.exit(f"error: there is no {missing[0]}; --sentences takes a folder with train.txt, valid.txt and test.txt")


def table_of_models(rows: dict) -> tuple[list[str], list[list[str]]]:
    header = ["", "perplexity", "active only", "1% only", "one only"]
    header += ["active", "share", "sentences/s", "times dense", "kB"]
    table = []
    for name, row in rows.items():
        found = [f"{score['perplexity']:.2f}" for score in row["rows"]]
        found += [""] * (4 - len(found))
        if "exact" not in row:
            table.append([name, *found, "", "", f"{row['rows'][0]['sentences_per_second']:,.0f}", "", ""])
            continue
        exact, total = row["exact"], row["words"]["prototypes"]
        faster = exact["sentences_per_second"] / rows["dense editor"]["exact"]["sentences_per_second"]
        table.append(
            [
                name, *found, f"{row['active']:,}", f"{row['active'] / total:.1%}",
                f"{exact['sentences_per_second']:.2f}", f"{faster:,.1f}", f"{exact['bytes'] / 1e3:,.0f}",
            ]
        )  # fmt: skip
    return header, table


def table_of_words(rows: dict) -> tuple[list[str], list[list[str]]]:
    """Which words test sentences keep of their best prototype."""
    with_words = {name: row["words"]["kept"] for name, row in rows.items() if "words" in row}
    classes = [part["class"] for part in next(iter(with_words.values()))]
    table = [[name, *(f"{part['kept']:.1%}" for part in kept)] for name, kept in with_words.items()]
    return ["words kept from the prototype", *classes], table


if __name__ == "__main__":
    main()
