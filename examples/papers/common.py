"""What the recipes share: the arguments, running a command once, writing the page."""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

from fairseq_knnlm.analysis.report import table


class Recipe:
    """Runs the commands that a user would type, shows them, and skips what is done."""

    def __init__(self, name: str, description: str, *options: tuple[tuple, dict]):
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("data", help="binarised corpus with train and valid")
        parser.add_argument("path", metavar="checkpoint")
        parser.add_argument("work", help="folder for datastores and saves; what is there is not made again")
        parser.add_argument("--out", help="where the table, JSON and plot go (default: WORK/results)")
        parser.add_argument("--tokens-per-sample", default="256", help="context included (default: %(default)s)")
        parser.add_argument("--context-window", default="128")
        parser.add_argument(
            "--parts", default="10", help="cut valid into this many parts and score one or two (default: %(default)s)"
        )
        parser.add_argument("--report", action="store_true", help="only write the page from the JSON file")
        for names, settings in options:
            parser.add_argument(*names, **settings)
        self.name, self.args = name, parser.parse_args()
        self.work = Path(self.args.work)
        self.out = Path(self.args.out or self.work / "results")
        self.out.mkdir(parents=True, exist_ok=True)

    # --- commands ---------------------------------------------------------------------------------------------------

    def run(self, *command: object) -> str:
        """Run a command, shown first; its standard output."""
        words = [str(word) for word in command]
        print("$ " + shlex.join(words), flush=True)
        process = subprocess.run(words, capture_output=True, text=True)
        if process.returncode:
            sys.exit(process.stdout[-2000:] + process.stderr[-2000:])
        return process.stdout

    def eval_lm(self, *flags: object, data: str | None = None) -> None:
        self.run(
            "fairseq-eval-lm", data or self.args.data, "--path", self.args.path, "--user-dir", "fairseq_knnlm",
            "--task", "knn_language_modeling", "--tokens-per-sample", self.args.tokens_per_sample,
            "--context-window", self.args.context_window, "--max-tokens", "4096", "--no-progress-bar", *flags,
        )  # fmt: skip

    def dump(self, folder: Path, *flags: object, data: str | None = None) -> Path:
        """The datastore of the training split; an interrupted dump resumes by itself."""
        self.eval_lm("--gen-subset", "train", "--knn-dump", folder, *flags, data=data)
        return folder

    def datastore(self, fraction: str = "1") -> Path:
        """The datastore of all of the training split, or of a random part of it."""
        whole = self.work / "datastore"
        if not (whole / "manifest.json").exists():
            self.dump(whole)
        if fraction == "1":
            return whole
        part = self.work / f"datastore-{fraction}"
        self.run("knnlm", "subsample", whole, "--fraction", fraction, "-o", part)
        return part

    def save(self, folder: Path, *flags: object, part: int = 0, data: str | None = None) -> Path:
        """A save of one part of the validation split."""
        if not (folder / "run.json").exists():
            parts = ["--num-shards", self.args.parts, "--shard-id", part]
            self.eval_lm("--gen-subset", "valid", *parts, *flags, "--knn-save", folder, data=data)
        return folder

    def sweep(self, save: Path, over: str, *flags: object) -> list[dict]:
        """The rows of a sweep."""
        file = self.work / "sweep.json"
        self.run("knnlm", "sweep", save, "--over", over, *flags, "-o", file)
        return json.loads(file.read_text())

    def tune(self, save: Path, report: Path) -> dict:
        """Tuned on one save, reported on the other: the result of the latter, and the flags."""
        output = json.loads(self.run("knnlm", "tune", save, "--report", report, "--json"))
        return {"flags": output["flags"], **output["results"]["valid, report"]}

    # --- pages ------------------------------------------------------------------------------------------------------

    def measured(self, measure) -> dict:
        """What ``measure(recipe)`` returns, kept in a JSON file."""
        file = self.out / f"{self.name}.json"
        if not self.args.report:
            file.write_text(json.dumps(measure(self), indent=1) + "\n")
        return json.loads(file.read_text())

    def write_page(self, title: str, intro: str, tables: list[tuple[list[str], list[list[str]]]], plots: list[str]):
        """Markdown with tables and plots; ``<name>.notes.md`` (what a person has to say of it) is put in the middle."""
        parts = [f"## {title}", intro, *(table(*rows, markdown=True) for rows in tables)]
        notes = self.out / f"{self.name}.notes.md"
        if notes.exists():
            parts.append(notes.read_text().strip())
        parts += [f"![{title}]({plot})" for plot in plots]
        (self.out / f"{self.name}.md").write_text("\n\n".join(parts) + "\n")
        print("\n" + "\n\n".join(table(*rows) for rows in tables))
