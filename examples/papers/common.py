"""What the recipes share: the arguments, running a command once, writing the page."""

import argparse
import json
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # for the benchmarks, which run commands, too

from benchmarks.command import REPOSITORY, eval_lm_command, run
from fairseq_knnlm.report.tables import table
from fairseq_knnlm.saved_runs.scores import SavedScores

PACKAGES = ("fairseq-fixed", "torch", "faiss-cpu", "numpy")


class Recipe:
    """Runs the commands that a user would type, shows them, and skips what is done."""

    def __init__(
        self,
        name: str,
        description: str,
        *options: tuple[tuple, dict],
        places: tuple[str, ...] = ("data", "checkpoint", "work"),
        context: tuple[str, str] = ("256", "128"),
    ):
        """
        Args:
            places: what it takes, in order; a recipe that trains its LMs takes no checkpoint
            context: the defaults of --tokens-per-sample and --context-window
        """
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        for place in places:
            parser.add_argument(place, nargs="?", help=PLACES[place])
        parser.add_argument("--out", help="where the table, JSON and plot go (default: WORK/results)")
        parser.add_argument("--tokens-per-sample", default=context[0], help="context included (default: %(default)s)")
        parser.add_argument("--context-window", default=context[1])
        parser.add_argument(
            "--parts", default="10", help="cut valid into this many parts and score one or two (default: %(default)s)"
        )
        parser.add_argument("--report", action="store_true", help="only write the page from the JSON file")
        for names, settings in options:
            parser.add_argument(*names, **settings)
        self.name, self.args = name, parser.parse_args()
        if not self.args.work and not (self.args.report and self.args.out):
            parser.error(f"{', '.join(places)} are needed to measure (--report --out DIR to write the page again)")
        self.work = Path(self.args.work or self.args.out)
        self.out = Path(self.args.out or self.work / "results")
        self.out.mkdir(parents=True, exist_ok=True)
        self.commands: list[str] = []

    # --- commands ---------------------------------------------------------------------------------------------------

    def run(self, *command: object, done: bool = False, output: str = "stdout") -> str:
        """Run a command, shown first; its standard output, or all output. What is ``done`` is noted only."""
        words = [str(word) for word in command]
        self.commands.append(self.anywhere(shlex.join(words)))
        if done:
            return ""
        return run(*words)[output]

    def anywhere(self, command: str) -> str:
        """The command with the names of the arguments for the places that they stand for."""
        places = {name: value for name, value in vars(self.args).items() if isinstance(value, str) and "/" in value}
        for name, place in sorted(places.items(), key=lambda item: -len(item[1])):
            command = command.replace(place, name.upper())
        return command.replace(f"{REPOSITORY}/", "")

    def eval_lm(self, *flags: object, data: str | None = None, path: str | None = None, done: bool = False) -> str:
        """fairseq-eval-lm; all that it prints."""
        context = {name: getattr(self.args, name) for name in ("tokens_per_sample", "context_window")}
        command = eval_lm_command(data or self.args.data, path or self.args.checkpoint, *flags, **context)
        return self.run(*command, done=done, output="output")

    def dump(self, folder: Path, *flags: object, data: str | None = None, path: str | None = None) -> Path:
        """The datastore of the training split; an interrupted dump resumes by itself."""
        done = (folder / "manifest.json").exists() and json.loads((folder / "manifest.json").read_text())["complete"]
        self.eval_lm("--gen-subset", "train", "--knn-dump", folder, *flags, data=data, path=path, done=done)
        return folder

    def datastore(self, fraction: str = "1") -> Path:
        """The datastore of all of the training split, or of a random part of it."""
        whole = self.dump(self.work / "datastore")
        return whole if fraction == "1" else self.subsample(whole, fraction)

    def subsample(self, whole: Path, fraction: str) -> Path:
        part = whole.with_name(f"{whole.name}-{fraction}")
        self.run("knnlm", "subsample", whole, "--fraction", fraction, "--seed", "1", "-o", part)
        return part

    def save(
        self, folder: Path, *flags: object, part: int = 0, data: str | None = None, path: str | None = None
    ) -> Path:
        """A save of one part of the validation split."""
        parts = ["--num-shards", self.args.parts, "--shard-id", part]
        done = (folder / "run.json").exists()
        self.eval_lm("--gen-subset", "valid", *parts, *flags, "--knn-save", folder, data=data, path=path, done=done)
        return folder

    def sweep(self, save: Path, over: str, *flags: object) -> list[dict]:
        """The rows of a sweep."""
        file = self.work / "sweep.json"
        self.run("knnlm", "sweep", save, "--over", over, *flags, "-o", file)
        return json.loads(file.read_text())

    def tune(self, save: Path, report: Path, *flags: object) -> dict:
        """Tuned on one save, reported on the other: the result of the latter, the former's, and the flags."""
        output = json.loads(self.run("knnlm", "tune", save, "--report", report, *flags, "--json"))
        tuned = output["results"]["valid, tuned on it"]["mixture"]
        return {"flags": output["flags"], "tuned": tuned, **output["results"]["valid, report"]}

    def mix(self, saves: list[Path], reports: list[Path]) -> dict:
        """Several saves as one mixture, the weights tuned on some and reported on others: weights and result."""
        output = json.loads(self.run("knnlm", "mix", *saves, "--report", *reports, "--json"))
        return {"weights": list(output["weights"].values()), **output["results"]["valid, report"]}

    # --- pages ------------------------------------------------------------------------------------------------------

    def measured(self, measure) -> dict:
        """What ``measure(recipe)`` returns, kept in a JSON file with the commands and versions."""
        file = self.out / f"{self.name}.json"
        if not self.args.report:
            results = measure(self)
            versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
            content = {
                "recipe": self.anywhere(shlex.join(["python", *sys.argv])),
                "commands": self.commands,
                "versions": versions,
                "results": results,
            }
            file.write_text(json.dumps(content, indent=1) + "\n")
        return json.loads(file.read_text())["results"]

    def write_page(self, title: str, intro: str, tables: list[tuple[list[str], list[list[str]]]], plots: list[str]):
        """Markdown with tables and plots; ``<name>.notes.md`` (what a person has to say of it) is put in the middle."""
        parts = [f"## {title}", intro, *(table(*rows, markdown=True) for rows in tables)]
        notes = self.out / f"{self.name}.notes.md"
        if notes.exists():
            parts.append(notes.read_text().strip())
        parts += [f"![{title}]({plot})" for plot in plots]
        (self.out / f"{self.name}.md").write_text("\n\n".join(parts) + "\n")
        print("\n" + "\n\n".join(table(*rows) for rows in tables))


PLACES = {
    "data": "binarised corpus with train and valid",
    "checkpoint": "of an LM with its dictionary",
    "work": "folder for datastores and saves; what is there is not made again",
}


def lm_perplexity(save: Path) -> float:
    """Of the LM alone, over the tokens of a save."""
    return float(np.exp(-SavedScores.open([save]).lm.mean()))


def tuned_temperature(result: dict) -> list[str]:
    """A tuned temperature, as flags of knnlm sweep."""
    words = result["flags"].split()
    return ["--temperature", words[words.index("--knn-temperature") + 1]]


def training_facts(checkpoint: str) -> dict:
    """How an LM was trained, as far as its checkpoint says."""
    from fairseq_knnlm.fairseq_setup import set_up_fairseq

    set_up_fairseq()  # old checkpoints load, without running code
    from fairseq.checkpoint_utils import load_checkpoint_to_cpu

    state = load_checkpoint_to_cpu(checkpoint)
    settings, place = state["cfg"], state.get("extra_state", {}).get("train_iterator", {})
    facts = {
        "parameters": sum(tensor.numel() for tensor in _distinct(state["model"])),
        "seed": settings["common"]["seed"],
        "tokens_per_batch": settings["dataset"]["max_tokens"] * settings["optimization"]["update_freq"][0],
        "max_update": settings["optimization"]["max_update"],
        "lr": list(settings["optimization"]["lr"]),
        "dropout": settings["model"].dropout,
    }
    return {**facts, **{name: place[name] for name in ("epoch", "iterations_in_epoch") if name in place}}


def _distinct(tensors: dict) -> list:
    """Tied weights once."""
    return list({tensor.data_ptr(): tensor for tensor in tensors.values()}.values())
