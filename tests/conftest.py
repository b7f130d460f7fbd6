"""A small corpus and small models, made once for all tests by the stock fairseq commands."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # everything is tiny; threads would wait for each other
REPO = Path(__file__).resolve().parent.parent
DIM = 64


def run(*command: str, check: bool = True, **kwargs) -> subprocess.CompletedProcess:
    """Run a command as a user would, from the project's folder."""
    command = [str(part) for part in command]
    if command[0].startswith("fairseq-"):
        command[:1] = [sys.executable, "-m", "fairseq_cli." + command[0][len("fairseq-") :].replace("-", "_")]
    elif command[0] == "knnlm":
        command[:1] = [sys.executable, "-m", "fairseq_knnlm.cli"]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, **kwargs)
    if check and result.returncode:
        pytest.fail(f"{' '.join(command)}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")
    return result


def write_text(path: Path, lines: int, seed: int) -> None:
    """Sentences of a small random grammar: repetitive enough for retrieval to help."""
    rng = np.random.default_rng(seed)
    grammar = np.random.default_rng(7)
    followers = {word: grammar.choice(200, 4) for word in range(200)}
    with open(path, "w") as file:
        for _ in range(lines):
            word, sentence = int(rng.integers(200)), []
            for _ in range(int(rng.integers(5, 25))):
                sentence.append(f"w{word}")
                word = int(rng.choice(followers[word]))
            file.write(" ".join(sentence) + "\n")


def preprocess(folder: Path, dictionary: Path | None = None, **texts: Path) -> Path:
    prefs = [part for split, text in texts.items() for part in (f"--{split}pref", text)]
    extra = ["--srcdict", dictionary] if dictionary else []
    run("fairseq-preprocess", "--only-source", *prefs, "--destdir", folder, "--workers", "1", *extra)
    return folder


def train(data: Path, folder: Path, *extra: str, arch: str = "transformer_lm") -> Path:
    run(
        "fairseq-train", data, "--task", "language_modeling", "--arch", arch, "--save-dir", folder, "--cpu",
        "--decoder-layers", "2", "--decoder-embed-dim", str(DIM), "--decoder-input-dim", str(DIM),
        "--decoder-output-dim", str(DIM), "--decoder-ffn-embed-dim", "128", "--decoder-attention-heads", "2",
        "--tokens-per-sample", "64", "--max-tokens", "1024", "--max-update", "60", "--optimizer", "adam",
        "--lr", "0.005", "--dropout", "0.1", "--no-epoch-checkpoints", "--disable-validation", "--no-progress-bar",
        *extra,
    )  # fmt: skip
    return folder / "checkpoint_last.pt"


ADAPTIVE = [
    "--adaptive-input", "--adaptive-input-cutoff", "50,120", "--adaptive-softmax-cutoff", "50,120",
    "--adaptive-input-factor", "2", "--adaptive-softmax-factor", "2", "--tie-adaptive-weights",
    "--tie-adaptive-proj", "--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp",
    "--decoder-normalize-before",
]  # fmt: skip


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Binarised train (about 9,000 tokens), valid and test (about 1,600 each)."""
    folder = tmp_path_factory.mktemp("corpus")
    for seed, (split, lines) in enumerate([("train", 600), ("valid", 100), ("test", 100)]):
        write_text(folder / f"{split}.txt", lines, seed)
    return preprocess(folder / "bin", train=folder / "train.txt", valid=folder / "valid.txt", test=folder / "test.txt")


@pytest.fixture(scope="session")
def adaptive_model(corpus, tmp_path_factory) -> Path:
    return train(corpus, tmp_path_factory.mktemp("adaptive"), *ADAPTIVE)


@pytest.fixture(scope="session")
def plain_model(corpus, tmp_path_factory) -> Path:
    return train(corpus, tmp_path_factory.mktemp("plain"), "--decoder-normalize-before", "--seed", "2")


@pytest.fixture(scope="session")
def post_norm_model(corpus, tmp_path_factory) -> Path:
    return train(corpus, tmp_path_factory.mktemp("post_norm"), "--max-update", "2")


def eval_lm_here(data: Path, model: Path, *flags, stock: bool = False) -> dict:
    """fairseq-eval-lm in this process, which saves the seconds that importing fairseq takes."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq_cli import eval_lm

    task = [] if stock else ["--user-dir", REPO / "fairseq_knnlm", "--task", "knn_language_modeling"]
    arguments = [data, "--path", model, *EVAL_FLAGS, *task, *flags]
    args = options.parse_args_and_arch(options.get_eval_lm_parser(), list(map(str, arguments)))
    return eval_lm.main(convert_namespace_to_omegaconf(args))


EVAL_FLAGS = [
    "--cpu", "--tokens-per-sample", "64", "--context-window", "32", "--max-tokens", "1024", "--no-progress-bar",
    "--num-workers", "0",
]  # fmt: skip


class Evaluator:
    """fairseq-eval-lm in this process: its result, the score of every token in corpus order, and what it logged."""

    def __init__(self, caplog):
        self._caplog = caplog

    def __call__(self, data: Path, model: Path, *flags, stock: bool = False, split: str = "valid") -> SimpleNamespace:
        self._caplog.clear()
        with self._caplog.at_level(logging.INFO):
            results = eval_lm_here(data, model, "--gen-subset", split, "--output-word-probs", *flags, stock=stock)
        lines = {}
        for message in self._caplog.messages:
            if match := re.match(r"(\d+) (\S+ \[.*)", message):
                lines[int(match[1])] = [float(score) for score in re.findall(r"\[(\S+)\]", match[2])]
        scores = np.array([score for number in sorted(lines) for score in lines[number]])
        return SimpleNamespace(loss=float(results["loss"]), scores=scores, log=self._caplog.text)


@pytest.fixture
def evaluate(caplog) -> Evaluator:
    return Evaluator(caplog)


@pytest.fixture(scope="session")
def dump(corpus, adaptive_model, tmp_path_factory):
    """dump(split, *flags): the datastore folder of a split, made once for each choice of flags."""
    made: dict[tuple, Path] = {}

    def make(split: str, *flags: str, model: Path | None = None) -> Path:
        key = (split, flags, model)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("datastores") / "store"
            # With an index "auto", whatever other indexes tests build is not taken by default.
            dumping = ["--gen-subset", split, "--knn-dump", made[key], "--knn-index", "auto"]
            eval_lm_here(corpus, model or adaptive_model, *dumping, *flags)
        return made[key]

    return make


def eval_lm(data: Path, model: Path, *flags, check: bool = True, **kwargs) -> subprocess.CompletedProcess:
    """fairseq-eval-lm as a process of its own."""
    task = ["--user-dir", "fairseq_knnlm", "--task", "knn_language_modeling"]
    return run("fairseq-eval-lm", data, "--path", model, *EVAL_FLAGS, *task, *flags, check=check, **kwargs)


def fails_with(result: subprocess.CompletedProcess, *parts: str) -> str:
    """The command failed with one sentence, not a traceback, which contains these parts."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr, result.stderr[-2000:]
    sentence = [line for line in result.stderr.splitlines() if "error: " in line][-1]
    for part in parts:
        assert part in sentence
    return sentence
