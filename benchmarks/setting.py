"""What is measured on: text, model, datastore; given, or made the way the demo does, smaller."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fairseq.data import Dictionary, data_utils, indexed_dataset

from fairseq_knnlm.datastore import Datastore

from .command import REPOSITORY, eval_lm_command, run


@dataclass
class Setting:
    data: Path  # binarised, with train and valid
    path: Path  # checkpoint
    datastore: Path  # of train; dumped if it is missing
    work: Path
    part_tokens: int  # of valid, for what is too slow for all of it

    def eval_lm(self, *flags: object, data: Path | None = None, split: str = "valid", stock: bool = False) -> dict:
        """Run fairseq-eval-lm, as it comes or with our task."""
        return run(*eval_lm_command(data or self.data, self.path, "--gen-subset", split, *flags, stock=stock))

    def anywhere(self, command: str) -> str:
        """A command with the names of the places that are of this machine alone."""
        places = {"DATASTORE": self.datastore, "DATA": self.data, "CHECKPOINT": self.path, "WORK": self.work}
        for name, place in sorted(places.items(), key=lambda item: -len(str(item[1]))):
            command = command.replace(str(place), name)
        return command.replace(f"{REPOSITORY}/", "").replace(sys.executable, "python")

    def open_datastore(self) -> Datastore:
        self.eval_lm("--knn-dump", self.datastore, split="train")  # or see that it is complete
        return Datastore(self.datastore)

    def part(self) -> Path:
        """A data folder whose valid is the first ``part_tokens`` tokens of valid."""
        folder = self.work / f"part-{self.part_tokens}"
        if not (folder / "valid.idx").exists():
            folder.mkdir(parents=True, exist_ok=True)
            dictionary = Dictionary.load(str(self.data / "dict.txt"))
            dictionary.save(str(folder / "dict.txt"))
            lines = data_utils.load_indexed_dataset(str(self.data / "valid"), dictionary)
            builder = indexed_dataset.make_builder(str(folder / "valid.bin"), "mmap", len(dictionary))
            tokens = 0
            for line in lines:
                if tokens >= self.part_tokens:
                    break
                builder.add_item(line)
                tokens += len(line)
            builder.finalize(str(folder / "valid.idx"))
        return folder

    def queries(self) -> Datastore:
        """The keys of the part, as queries; its values are the targets."""
        self.eval_lm("--knn-dump", self.work / "queries", data=self.part())
        return Datastore(self.work / "queries")

    def open_compact(self) -> Datastore:
        """The datastore with half of the dimensions, in 8 bits; made if it is missing."""
        folder = self.work / "compact"
        run("knnlm", "compact", self.datastore, "--dim", max(1, Datastore(self.datastore).dim // 2), "-o", folder)
        return Datastore(folder)

    def open_averaged(self) -> Datastore:
        """Half of the compact datastore's entries, some of them averages of others; made if it is missing."""
        folder = self.work / "averaged"
        run("knnlm", "prune", self.open_compact().folder, "--keep", 0.5, "-o", folder)
        return Datastore(folder)

    def tuned(self, name: str, datastore: Path, *flags: object) -> dict[str, str]:
        """Lambda and temperature that are best for the part."""
        save = self.work / f"save-{name}"
        if not (save / "run.json").exists():
            self.eval_lm("--knn-datastore", datastore, *flags, "--knn-save", save, data=self.part())
        command = ["knnlm", "tune", save, "--json"]
        output = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout
        found = re.findall(r"--knn-(lambda|temperature) (\S+)", json.loads(output)["flags"])
        return dict(found)


def make_setting(work: Path, part_tokens: int) -> Setting:
    """Python's documentation and a small LM of it, as in examples/demo."""
    text, data, lm = work / "text", work / "bin", work / "lm"
    if not (text / "train.txt").exists():
        run(sys.executable, REPOSITORY / "examples/demo/corpus.py", text)
    if not (data / "train.idx").exists():
        run(
            "fairseq-preprocess", "--only-source", "--destdir", data, "--thresholdsrc", 2,
            "--trainpref", text / "train.txt", "--validpref", text / "valid.txt",
        )  # fmt: skip
    if not (lm / "checkpoint_best.pt").exists():
        run(
            "fairseq-train", data, "--save-dir", lm, "--task", "language_modeling", "--arch", "transformer_lm",
            "--decoder-layers", 2, "--decoder-attention-heads", 4, "--decoder-ffn-embed-dim", 512,
            "--decoder-embed-dim", 128, "--decoder-input-dim", 128, "--decoder-output-dim", 128,
            "--decoder-normalize-before", "--adaptive-input", "--adaptive-input-cutoff", 2000,
            "--adaptive-softmax-cutoff", 2000, "--tie-adaptive-weights", "--tie-adaptive-proj",
            "--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp", "--sample-break-mode", "none",
            "--tokens-per-sample", 256, "--max-tokens", 1024, "--optimizer", "adam", "--lr", 0.002, "--clip-norm", 1.0,
            "--lr-scheduler", "polynomial_decay", "--warmup-updates", 50, "--total-num-update", 300,
            "--max-update", 300, "--no-epoch-checkpoints", "--seed", 1, "--cpu", "--no-progress-bar",
        )  # fmt: skip
    return Setting(data, lm / "checkpoint_best.pt", work / "datastore", work, part_tokens)
