"""Small LMs of a part of a text, for experiments that need several of them."""

import os
import subprocess
from pathlib import Path

from common import REPOSITORY, Recipe

from benchmarks.command import TASK

OPTIONS = (
    (("--size",), {"default": "tiny", "help": "of the LMs, see examples/lib.sh (default: %(default)s)"}),
    (("--updates",), {"default": "300", "help": "of each training (default: %(default)s)"}),
    (("--tokens",), {"default": "400000", "help": "of train, that they are trained on (default: %(default)s)"}),
)
PLACES = ("data", "work")
CONTEXT = ("128", "64")  # that the size tiny is trained with, and half of it


class SmallLMs:
    """Trains LMs on the first tokens of DATA's train. What is there is not trained again."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.updates = recipe, int(recipe.args.updates)
        self.folder = recipe.work / f"part-{recipe.args.tokens}-{recipe.args.size}-{recipe.args.updates}"
        self.data = str(self.folder / "data")
        cut = ["python", REPOSITORY / "examples/papers/cut.py", recipe.args.data, self.data]
        recipe.run(*cut, "--tokens", recipe.args.tokens, done=(self.folder / "data/train.idx").exists())

    def train(self, name: str, *flags: object, updates: int | None = None, soft: bool = False) -> str:
        """An LM of this name; its checkpoint.

        Args:
            soft: another criterion than that of the adaptive softmax is among the flags
        """
        count, folder = updates or self.updates, self.folder / name
        criterion = ["--criterion", "soft_labels"] if soft else []
        command = ["fairseq-train", self.data, *TASK, "--save-dir", folder, *self._flags(), "--max-update", count]
        command += ["--total-num-update", count, "--disable-validation", "--no-epoch-checkpoints", "--no-progress-bar"]
        checkpoint = folder / "checkpoint_last.pt"
        self.recipe.run(*command, *criterion, *flags, done=(folder / "done").exists())
        (folder / "done").touch()
        return str(checkpoint)

    def _flags(self) -> list[str]:
        """Of this size in examples/lib.sh, which the shell recipes train with, too."""
        size = self.recipe.args.size
        script = f'source examples/lib.sh; training_flags {size}; printf "%s\\n" "${{training[@]}}" "${{device[@]}}"'
        return _lines_of(script, self.recipe.work / "logs")

    def datastore(self, checkpoint: str, name: str = "datastore") -> Path:
        """Of all of the text that the LMs are trained on."""
        return self.recipe.dump(self.folder / name, "--knn-index", "auto", data=self.data, path=checkpoint)

    def save(self, name: str, checkpoint: str, *flags: object, part: int) -> Path:
        """Of a part of valid."""
        folder = self.folder / f"{name}-{part}"
        return self.recipe.save(folder, *flags, part=part, data=self.data, path=checkpoint)

    def saves(self, name: str, checkpoint: str, *flags: object) -> list[Path]:
        """Of the part to tune on, and of the part to report."""
        return [self.save(name, checkpoint, *flags, part=part) for part in (0, 1)]

    def facts(self) -> str:
        """For a page: what was trained."""
        args = self.recipe.args
        return f"LMs of the size `{args.size}`, {self.updates} updates each, on {int(args.tokens):,} tokens"


def _lines_of(script: str, logs: Path) -> list[str]:
    environment = {**os.environ, "logs": str(logs.resolve())}
    done = subprocess.run(
        ["bash", "-c", script], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()
