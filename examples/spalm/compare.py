"""Transformer-XL and SPALM under fair conditions: one command from a frozen LM and a text to a page.

    python examples/spalm/compare.py --key-lm lm.pt --data DATA-BIN --work WORK --out OUT --seeds 1,2,3 --updates 10000
    python examples/spalm/compare.py --key-lm lm.pt --dict dict.txt --train train.txt.gz --valid valid.txt ...

Networks, frozen LM and datastore are of the same text. Trained are a Transformer-XL and a SPALM of the same size for
each seed, and, for --factor-updates, SPALM with one thing changed at a time. Scored is the second half of valid, at the
memory of training and at --test-memory times as much; kNN-LMs are tuned on the first half. Interrupted, the same
command continues; a finished step is not run again. WORK/steps.json has every command with its seed and seconds. Writes
OUT/NAME.json, OUT/NAME.md and plots; with --report only the page from OUT/NAME.json.
"""

import argparse
import gzip
import json
import sys
from functools import partial
from pathlib import Path

import compare_page
from compare_steps import USER_DIR, Steps

from fairseq_knnlm.storage import file_sha256

K_VALUES = (1, 2, 4, 8, 16)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work", type=Path, help="for everything that is made")
    add("--out", type=Path, required=True, help="for the page, its JSON and its plots")
    add("--name", default="spalm_words", help="of the page (default: %(default)s)")
    add("--about", default="", help="what text, LM and machine, for the page")
    add("--report", action="store_true", help="only write the page again, from its JSON")
    add("--key-lm", type=Path, help="checkpoint of the frozen LM")
    add("--key-context", default="256,128", help="its --tokens-per-sample,--context-window (default: %(default)s)")
    add("--data", type=Path, help="binarised text with train and valid; or:")
    add("--dict", type=Path, help="dictionary of the frozen LM")
    add("--train", type=Path, help="tokenised text, plain or .gz")
    add("--valid", type=Path, help="tokenised text, plain or .gz")
    add("--train-tokens", type=int, help="use so many tokens of the beginning of --train, up to a line's end")
    add("--datastore", type=Path, help="of the frozen LM, if there is one already: of train, or a text it is part of")
    add("--seeds", default="1,2,3", help="of each network (default: %(default)s)")
    add("--updates", type=int, default=10000, help="of each network (default: %(default)s)")
    add("--factor-updates", type=int, help="of each factor experiment; 0: none (default: a quarter of --updates)")
    add("--factors", help="only these of the factor experiments, by name (default: all)")
    add("--points", type=int, default=10, help="of each learning curve (default: %(default)s)")
    add("--arch", default="spalm_lm", help="of SPALM; spalm_lm_small_budget has our options (default: %(default)s)")
    sizes = {"layers": 2, "dim": 128, "ffn-dim": 512, "heads": 4, "lanes": 8, "segment": 128, "memory": 128, "k": 4}
    for name, default in sizes.items():
        add(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    add("--test-memory", type=int, default=6, help="times --memory, the larger one of scoring (default: %(default)s)")
    add("--cutoffs", default="4000,16000", help="of the adaptive softmax; '' for characters (default: %(default)s)")
    add("--lr", type=float, default=0.003, help="(default: %(default)s)")
    add("--nprobe", type=int, default=8, help="of the tables (default: %(default)s)")
    add("--large-window", type=int, default=5000, help="of the factor experiment (default: %(default)s)")
    add("--recall", type=int, default=2000, help="queries for the recall of the tables' search (default: %(default)s)")
    add("--jobs", type=int, default=2, help="trainings at a time, with as many threads less (default: %(default)s)")
    args = parser.parse_args()
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    args.factor_updates = args.updates // 4 if args.factor_updates is None else args.factor_updates
    if not args.report and not (args.work and args.key_lm and (args.data or (args.dict and args.train and args.valid))):
        parser.error("give --work, --key-lm, and --data or --dict, --train and --valid (or --report)")
    return args


def cut(source: Path, target: Path, tokens: int | None) -> None:
    """Copy a text, or its first lines that have so many tokens."""
    opener = gzip.open if source.suffix == ".gz" else open
    temporary, count = target.with_suffix(".part"), 0
    with opener(source, "rt", encoding="utf-8") as lines, open(temporary, "w", encoding="utf-8") as out:
        for line in lines:
            count += len(line.split()) + 1
            if tokens is not None and count > tokens:
                break
            out.write(line)
    temporary.replace(target)


class Comparison:
    """All steps, in order."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.work = args, args.work.resolve()
        self.steps = Steps(self.work, args.jobs)
        self.data = args.data.resolve() if args.data else self.work / "bin"
        read, window = args.key_context.split(",")
        self.reading = ["--tokens-per-sample", read, "--context-window", window, "--sample-break-mode", "none"]
        self.reading += ["--max-tokens", 4096, "--cpu", "--no-progress-bar", "--user-dir", USER_DIR]
        self.datastore = args.datastore.resolve() if args.datastore else self.work / "keys-train"
        self.window = int(read)
        self.most_k = max(*K_VALUES, args.k) if args.factor_updates else args.k

    def run(self) -> None:
        self.binarise()
        self.find_neighbors()
        jobs = [partial(self.train, f"xl-{seed}", seed, "transformer_xl_lm", []) for seed in self.args.seeds]
        jobs += [partial(self.train_spalm, f"spalm-{seed}", seed, []) for seed in self.args.seeds]
        if self.args.factor_updates:
            jobs += [
                partial(self.train_spalm, f"factor-{name}", self.args.seeds[0], flags, self.args.factor_updates, tables)
                for name, (flags, tables) in self.factors().items()
            ]
            jobs.append(
                partial(self.train, "factor-xl", self.args.seeds[0], "transformer_xl_lm", [], self.args.factor_updates)
            )
        self.steps.together(jobs)
        self.steps.together([partial(self.score, f"{kind}-{s}") for kind in ("xl", "spalm") for s in self.args.seeds])
        self.score_key_lm()
        if self.args.factor_updates:
            names = [*(f"factor-{name}" for name in self.factors()), "factor-xl"]
            tables = {f"factor-{name}": tables for name, (_, tables) in self.factors().items()}
            self.steps.together([partial(self.score_bare, name, 1, tables.get(name, "neighbors")) for name in names])

    # --- text and neighbours ---------------------------------------------------------------------------------------

    def binarise(self) -> None:
        if self.args.data:
            return
        text = self.work / "text"
        text.mkdir(parents=True, exist_ok=True)

        def copy() -> None:
            """the text, or the beginning of it that --train-tokens asks for"""
            cut(self.args.train, text / "train.txt", self.args.train_tokens)
            cut(self.args.valid, text / "valid.txt", None)

        self.steps.call("text", copy)
        self.steps.run(
            "binarise", "fairseq-preprocess", "--only-source", "--workers", 1, "--destdir", self.data,
            "--srcdict", self.args.dict.resolve(), "--trainpref", text / "train.txt", "--validpref", text / "valid.txt",
        )  # fmt: skip

    def find_neighbors(self) -> None:
        """Tables of train and valid with the most neighbours that any network reads; of train with two windows."""
        key_lm = self.args.key_lm.resolve()
        self.queries = {split: self.work / f"keys-{split}" for split in ("train", "valid")}
        if self.args.datastore and self._is_of_train(self.datastore):
            self.queries["train"] = self.datastore
        for split, queries in self.queries.items():
            if queries == self.datastore and self.args.datastore:
                continue
            self.steps.run(
                f"keys-{split}", "fairseq-eval-lm", self.data, "--gen-subset", split, "--path", key_lm,
                "--task", "knn_language_modeling", *self.reading, "--knn-dump", queries,
            )  # fmt: skip
        self.steps.run("index", "knnlm", "build", self.datastore)
        search = ["knnlm", "neighbors", "--datastore", self.datastore, "--k", self.most_k, "--nprobe", self.args.nprobe]
        for split in ("train", "valid"):
            queries = ["--queries", self.queries[split]]
            table = [*queries, "-o", self.work / "neighbors" / split]
            self.steps.run(f"neighbors-{split}", *search, *table, *self._window(split, self.window))
            if self.args.recall:
                measured = [*queries, "--recall", self.args.recall, "--json"]
                self.steps.run(f"recall-{split}", *search, *measured, *self._window(split, self.window))
        if self.args.factor_updates:
            far = ["--window", self.args.large_window, "--queries", self.queries["train"]]
            self.steps.run("neighbors-far", *search, *far, "-o", self.work / "neighbors-far/train")
            same = self.work / "neighbors-far/valid"
            if not same.exists():
                same.symlink_to(self.work / "neighbors/valid")

    def _is_of_train(self, datastore: Path) -> bool:
        """Whether a datastore is of the very split that the networks are trained on."""
        source = json.loads((datastore / "manifest.json").read_text())["source"]
        return source.get("data_sha256") == file_sha256(self.data / "train.bin")

    def _window(self, split: str, window: int) -> list:
        return ["--window", window] if split == "train" else []

    # --- networks --------------------------------------------------------------------------------------------------

    def factors(self) -> dict[str, tuple[list, str]]:
        """Name -> flags of SPALM that differ, and the tables that it reads."""
        usual = "neighbors"
        changes: dict[str, tuple[list, str]] = {
            "literal": ([], usual),
            "sum-scaled": (["--neighbor-sum", "scaled"], usual),
            "sum-norm": (["--neighbor-sum", "norm"], usual),
            "embeddings-long": (["--embedding-length", 4], usual),
            "gate-bias": (["--gate-bias", 2], usual),
            "sum-norm-gate-bias": (["--neighbor-sum", "norm", "--gate-bias", 2], usual),
            "gate-scalar": (["--gate", "scalar"], usual),
            "dropout-0.1": (["--neighbor-dropout", 0.1], usual),
            "dropout-0.3": (["--neighbor-dropout", 0.3], usual),
            "window-large": ([], "neighbors-far"),
        }
        for k in (k for k in K_VALUES if k != self.args.k):  # which is "literal"
            changes[f"k-{k}"] = (["--neighbors-used", k], usual)
        chosen = self.args.factors.split(",") if self.args.factors else list(changes)
        if unknown := set(chosen) - set(changes):
            sys.exit(f"error: there is no factor {', '.join(sorted(unknown))}; choose from {', '.join(changes)}")
        return {name: changes[name] for name in dict.fromkeys(["literal", *chosen])}

    def train_spalm(
        self, name: str, seed: int, flags: list, updates: int | None = None, tables: str = "neighbors"
    ) -> None:
        arch = self.args.arch if updates is None else "spalm_lm"
        reading = ["--neighbors", self.work / tables, "--neighbors-used", self.args.k]
        self.train(name, seed, arch, [*reading, *flags], updates)

    def train(self, name: str, seed: int, arch: str, flags: list, updates: int | None = None) -> None:
        args, updates = self.args, updates or self.args.updates
        every = max(1, updates // args.points)
        softmax = ["--criterion", "cross_entropy"]
        if args.cutoffs:
            softmax = ["--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp"]
            softmax += ["--adaptive-cutoff", args.cutoffs, "--adaptive-factor", 4]
        self.steps.run(
            f"train-{name}", "fairseq-train", self.data, "--save-dir", self.work / "models" / name,
            "--user-dir", USER_DIR, "--task", "spalm", "--cpu", "--arch", arch, "--layers", args.layers,
            "--dim", args.dim, "--ffn-dim", args.ffn_dim, "--heads", args.heads, "--tokens-per-sample", args.segment,
            "--batch-size", args.lanes, "--memory-size", args.memory, *softmax, "--dropout", 0.1, "--optimizer", "adam",
            "--adam-betas", "(0.9, 0.98)", "--clip-norm", 1.0, "--lr", args.lr, "--lr-scheduler", "polynomial_decay",
            "--warmup-updates", max(1, updates // 12), "--total-num-update", updates, "--max-update", updates,
            "--seed", seed, "--validate-interval-updates", every, "--save-interval-updates", every,
            "--keep-interval-updates", 1, "--validate-interval", 1000, "--no-epoch-checkpoints", "--num-workers", 0,
            "--log-format", "json", "--log-interval", 100, *flags, seed=seed,
        )  # fmt: skip

    # --- scores ----------------------------------------------------------------------------------------------------

    def _scoring(self, name: str, times: int, tables: str = "neighbors") -> list:
        reading = ["--neighbors", self.work / tables] if "xl" not in name else []
        return [
            "fairseq-eval-lm", self.data, "--user-dir", USER_DIR, "--task", "spalm", "--cpu", "--no-progress-bar",
            "--path", self.work / "models" / name / "checkpoint_last.pt", "--tokens-per-sample", self.args.segment,
            "--model-overrides", f"{{'memory_size': {times * self.args.memory}}}", *reading,
        ]  # fmt: skip

    def score_bare(self, name: str, times: int, tables: str = "neighbors") -> None:
        half = ["--gen-subset", "valid", "--num-shards", 2, "--shard-id", 1]
        self.steps.run(f"score-{name}-{times}x", *self._scoring(name, times, tables), *half)

    def score(self, name: str) -> None:
        """Both memories, alone and with its own datastore, which is deleted when it is no longer needed."""
        keys = self.work / f"keys-of-{name}"
        for times in (1, self.args.test_memory):
            self.score_bare(name, times)
        if self.steps.done(f"tune-{name}-{self.args.test_memory}x"):
            return
        self.steps.run(f"dump-{name}", *self._scoring(name, 1), "--gen-subset", "train", "--knn-dump", keys)
        for times in (1, self.args.test_memory):
            saves = [self.work / "saves" / f"{name}-{times}x-{half}" for half in (0, 1)]
            for half, save in enumerate(saves):
                part = ["--gen-subset", "valid", "--num-shards", 2, "--shard-id", half]
                knn = ["--knn-datastore", keys, "--knn-k", 1024, "--knn-save", save]
                self.steps.run(f"knn-{name}-{times}x-{half}", *self._scoring(name, times), *part, *knn)
            self.steps.run(f"tune-{name}-{times}x", "knnlm", "tune", saves[0], "--report", saves[1], "--json")
        self.steps.forget(keys)

    def score_key_lm(self) -> None:
        """The frozen LM itself: another size and another training, on the same text."""
        half = ["--gen-subset", "valid", "--num-shards", 2, "--shard-id", 1]
        task = ["--task", "knn_language_modeling", "--path", self.args.key_lm.resolve()]
        self.steps.run("score-key-lm", "fairseq-eval-lm", self.data, *task, *self.reading, *half)


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.report:
        comparison = Comparison(args)
        comparison.run()
        compare_page.write_json(args.out / f"{args.name}.json", compare_page.collect(comparison))
    print(compare_page.write_page(args.out, args.name))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
