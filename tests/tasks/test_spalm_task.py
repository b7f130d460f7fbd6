"""The task spalm: memory over epochs, and what it refuses."""

import json
import math
import shutil

import numpy as np
import pytest
from commands import SPALM_SCORING, SPALM_TRAINING, XL, train_here

from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.models.transformer_xl import Lanes


@pytest.fixture
def lanes(monkeypatch):
    """What the model asked its memory for: (text, step, how many states it got)."""
    asked, get = [], Lanes.get

    def record(self, text, step, layers, like):
        states = get(self, text, step, layers, like)
        asked.append((text, step, states.size(2)))
        return states

    monkeypatch.setattr(Lanes, "get", record)
    return asked


def test_memory_over_epochs_and_splits(corpus, tokens, lanes, tmp_path):
    """Segments come in order; memory begins empty with each epoch and each split; resuming starts where it ended."""
    steps = math.ceil(math.ceil(tokens["train"] / 8) / 32)
    stop = steps + 5  # in the second epoch
    train_here(corpus, tmp_path, *SPALM_TRAINING, *XL, "--max-update", stop, "--max-epoch", "2")
    first = [(step, size) for text, step, size in lanes if text == "train"]
    assert [step for step, _ in first] == [*range(steps), *range(5)]
    assert all(size == (32 if step else 0) for step, size in first)
    valid = [(step, size) for text, step, size in lanes if text == "valid"]
    assert all((size == 0) == (step == 0) for step, size in valid) and len(valid) > 1
    lanes.clear()
    train_here(corpus, tmp_path, *SPALM_TRAINING, *XL, "--max-epoch", "2")
    resumed = [(step, size) for text, step, size in lanes if text == "train"]
    assert [step for step, _ in resumed] == list(range(5, steps))  # no segment twice, none left out
    assert [size for _, size in resumed[:3]] == [0, 32, 32]  # the memory begins empty after a restart


def test_bad_neighbours(corpus, neighbors, tmp_path):
    """Each is refused before training starts."""
    spalm = ["--arch", "spalm_lm_tiny", "--max-update", "1"]
    count = iter(range(100))

    def sentence(*flags) -> str:
        with pytest.raises(KnnlmError) as error:
            train_here(corpus, tmp_path / "model", *SPALM_TRAINING, *spalm, *flags)
        return str(error.value)

    def tables(**splits):
        folder = tmp_path / f"tables{next(count)}"
        folder.mkdir()
        for split, table in splits.items():
            (folder / split).symlink_to(table)
        return ["--neighbors", folder]

    def changed(split, change, kind="facts"):
        """A table of which one thing is different."""
        folder = tmp_path / f"changed{next(count)}"
        shutil.copytree(neighbors / split, folder)
        if kind == "facts":
            facts = json.loads((folder / "neighbors.json").read_text())
            change(facts)
            (folder / "neighbors.json").write_text(json.dumps(facts))
        else:
            np.save(folder / "tokens-00000.npy", change(np.load(folder / "tokens-00000.npy")))
        return folder

    train, valid = neighbors / "train", neighbors / "valid"
    assert "give --neighbors" in sentence()
    assert "lower --neighbors-used" in sentence("--neighbors", neighbors, "--neighbors-used", "5")
    assert "leave out --neighbors" in sentence("--neighbors", neighbors, "--neighbors-used", "0")
    assert "another text" in sentence(*tables(train=valid, valid=valid))  # of another split, of another length
    assert "valid is not a neighbor-table" in sentence(*tables(train=train))
    other = changed("valid", lambda facts: facts["queries"].update(dictionary_sha256="other"))
    assert "another dictionary" in sentence(*tables(train=train, valid=other))
    other = changed("valid", lambda facts: facts["queries"].update(data_sha256="other"))
    assert "another text" in sentence(*tables(train=train, valid=other))
    shifted = changed("train", lambda rows: np.roll(rows, 1, axis=0), "tokens")
    assert "has slipped" in sentence(*tables(train=shifted, valid=valid))
    shorter = changed("train", lambda rows: rows[:-1], "tokens")
    assert "but its record says" in sentence(*tables(train=shorter, valid=valid))
    assert not list((tmp_path / "model").glob("*.pt"))


def test_another_model_under_the_task(evaluate, corpus, adaptive_model):
    with pytest.raises(KnnlmError, match="use --task knn_language_modeling"):
        evaluate(corpus, adaptive_model, *SPALM_SCORING)
