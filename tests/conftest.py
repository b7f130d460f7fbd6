"""A small corpus, small models and their datastores, made once for all workers by the stock fairseq commands."""

import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # everything is tiny; threads would wait for each other

import torch
from commands import (
    SPALM_SCORING,
    SPALM_TRAINING,
    TRAINING,
    XL,
    eval_lm_here,
    make_table,
    preprocess_here,
    train_here,
)
from stores import DIM, make_store
from tiny import ADAPTIVE, write_lines

from fairseq_knnlm.datastore import Datastore

MakeOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(autouse=True)
def own_log():
    """A command sets up the log of its process; afterwards it is as it was, for the stream that it wrote to is gone."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        if handler not in before:
            root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory) -> MakeOnce:
    """made_once(name, make): a folder that ``make(folder)`` fills, in the first worker that asks for it."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    shared.mkdir(exist_ok=True)

    def once(name: str, make: Callable[[Path], object]) -> Path:
        folder, ready = shared / name, shared / f"{name}.ready"
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not ready.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
                folder.mkdir()
                make(folder)
                ready.touch()
        return folder

    return once


@pytest.fixture(scope="session")
def corpus(made_once) -> Path:
    """Binarised train (about 9,000 tokens), valid and test (about 1,600 each), with the text beside them."""

    def make(folder: Path) -> None:
        texts = {}
        for seed, (split, lines) in enumerate([("train", 600), ("valid", 100), ("test", 100)]):
            texts[split] = write_lines(folder / f"{split}.txt", lines, seed)
        preprocess_here(folder / "bin", **texts)

    return made_once("corpus", make) / "bin"


@pytest.fixture(scope="session")
def adaptive_model(corpus, made_once) -> Path:
    """With adaptive inputs and an adaptive softmax, as in the papers."""
    flags = [*TRAINING, *ADAPTIVE, "--decoder-normalize-before", "--max-update", "60"]
    return made_once("adaptive", lambda folder: train_here(corpus, folder, *flags)) / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def plain_model(corpus, made_once) -> Path:
    """With a plain softmax."""
    flags = [*TRAINING, "--decoder-normalize-before", "--seed", "2", "--max-update", "60"]
    return made_once("plain", lambda folder: train_here(corpus, folder, *flags)) / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def post_norm_model(corpus, made_once) -> Path:
    """Whose layers normalise their output, and which has no key, therefore."""
    flags = [*TRAINING, "--max-update", "2"]
    return made_once("post_norm", lambda folder: train_here(corpus, folder, *flags)) / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def dump(corpus, adaptive_model, made_once, tmp_path_factory) -> Callable[..., Path]:
    """dump(split, *flags): a copy for this worker of the datastore of a split, made once for each choice of flags."""
    copies: dict[tuple, Path] = {}

    def make(split: str, *flags: object, model: Path | None = None) -> Path:
        model = model or adaptive_model
        key = (split, *map(str, flags), str(model))

        def fill(folder: Path) -> None:
            # With an index "auto", whatever other indexes tests build is not taken by default.
            dumping = ["--gen-subset", split, "--knn-dump", folder / "store", "--knn-index", "auto"]
            eval_lm_here(corpus, model, *dumping, *flags)

        if key not in copies:
            name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
            copies[key] = tmp_path_factory.mktemp("datastores") / "store"
            shutil.copytree(made_once(f"dump-{name}", fill) / "store", copies[key])
        return copies[key]

    return make


# --- SPALM ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def neighbors(dump, made_once) -> Path:
    """Tables of the 4 nearest neighbours of train and valid in train."""

    def make(folder: Path) -> None:
        for split in ("train", "valid"):
            assert make_table(dump("train"), dump(split), folder / split, "--k", "4") == 0

    return made_once("neighbors", make)


@pytest.fixture(scope="session")
def spalm(corpus, neighbors, made_once) -> Path:
    flags = [*SPALM_TRAINING, "--arch", "spalm_lm_tiny", "--neighbors", neighbors, "--max-epoch", "3"]
    return made_once("spalm", lambda folder: train_here(corpus, folder, *flags)) / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def xl(corpus, made_once) -> Path:
    flags = [*SPALM_TRAINING, *XL, "--max-epoch", "2"]
    return made_once("xl", lambda folder: train_here(corpus, folder, *flags)) / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def xl_store(dump, xl) -> dict[str, Path]:
    """Datastores of the Transformer-XL's states."""
    return {split: dump(split, *SPALM_SCORING, "--knn-key-dtype", "float32", model=xl) for split in ("train", "valid")}


@pytest.fixture(scope="session")
def tokens(corpus) -> dict[str, int]:
    """Number of tokens of each split."""
    texts = {split: (corpus.parent / f"{split}.txt").read_text() for split in ("train", "valid")}
    return {split: sum(len(line.split()) + 1 for line in text.splitlines()) for split, text in texts.items()}


# --- Hugging Face ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def hugging_face(made_once) -> Callable[..., SimpleNamespace]:
    """hugging_face(kind): a tiny random model of this kind, its data and the checkpoint that points to it."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed; the extra hf brings it")
    from commands import knnlm
    from hugging_face import make_model, text_lines

    def make(kind: str = "llama") -> SimpleNamespace:
        def fill(folder: Path) -> None:
            make_model(folder / "model", kind)
            texts = {}
            for seed, (split, lines) in enumerate([("train", 150), ("valid", 40)]):
                texts[split] = folder / f"{split}.txt"
                texts[split].write_text("\n".join(text_lines(lines, seed)) + "\n")
            flags = ["--trainpref", texts["train"], "--validpref", texts["valid"], "--destdir", folder / "bin"]
            assert knnlm("hf", "prepare", folder / "model", *flags) == 0

        folder = made_once(f"hugging-face-{kind}", fill)
        data = folder / "bin"
        return SimpleNamespace(folder=folder / "model", data=data, path=data / "checkpoint.pt")

    return make


# --- scoring --------------------------------------------------------------------------------------------------------


class Evaluator:
    """fairseq-eval-lm in this process: its result, the score of every token in corpus order, and what it logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture):
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


# --- made-up keys ---------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path) -> Datastore:
    """3,000 made-up keys."""
    return make_store(tmp_path / "store", 3000)


@pytest.fixture(scope="session")
def lasting_store(tmp_path_factory) -> Callable[..., Datastore]:
    """lasting_store(entries, key_dtype, dim): made-up keys that nobody changes; an index that a test builds stays."""

    @functools.cache
    def make(entries: int = 3000, key_dtype: str = "float16", dim: int = DIM) -> Datastore:
        return make_store(tmp_path_factory.mktemp("lasting") / "store", entries, key_dtype, dim=dim)

    return make


@pytest.fixture
def queries(store) -> np.ndarray:
    """50 queries near keys of ``store``."""
    rng = np.random.default_rng(1)
    return store.gather_keys(rng.integers(0, len(store), 50)).astype(np.float32) + 0.1 * rng.normal(size=(50, DIM))


@pytest.fixture(params=[1, 4])
def threads(request):
    """Locks are tested only where several threads meet."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
