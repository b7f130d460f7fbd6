"""knnlm mix: several saves of one text, against a closed form and a grid."""

import json

import numpy as np
import pytest
import torch
from commands import error_of, knnlm
from saves import random_save

from fairseq_knnlm.saved_runs.format import RunFacts, SaveWriter
from fairseq_knnlm.saved_runs.joint import JointSaves, mix
from fairseq_knnlm.saved_runs.scores import SavedScores
from fairseq_knnlm.saved_runs.settings import memory_scores, stack
from fairseq_knnlm.saved_runs.tuning import tune
from fairseq_knnlm.saved_runs.weights import mixture_log_probs


def lm_save(folder, probabilities, checkpoint="a", start=0, split="valid", tokens=None, dictionary="e"):
    """A save of a bare LM that gives the tokens these probabilities."""
    count = len(probabilities)
    source = {"split": split, "data_sha256": "d", "checkpoint_sha256": checkpoint, "dictionary_sha256": dictionary}
    writer = SaveWriter(folder, RunFacts(source, start, start + count, 10_000, []))
    tokens = torch.zeros(count, dtype=torch.long) if tokens is None else torch.tensor(tokens)
    writer.add(torch.tensor(probabilities).log(), tokens)
    writer.finish(perplexity=1.0)
    return folder


def test_closed_form(tmp_path, capsys):
    """One LM knows 3 of 4 tokens with certainty, the other one the fourth: the best weights are 3/4 and 1/4."""
    sure, other = [1.0, 1.0, 1.0, 1e-30] * 50, [1e-30, 1e-30, 1e-30, 1.0] * 50
    a, b = lm_save(tmp_path / "a", sure), lm_save(tmp_path / "b", other, "b")
    assert knnlm("mix", a, b, "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert output["weights"] == pytest.approx({f"LM of {a}": 0.75, f"LM of {b}": 0.25}, abs=1e-4)
    result = output["results"]["valid, tuned on it"]
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    assert result["mixture"] == pytest.approx(np.exp(entropy), rel=1e-6)
    assert result["average"] == pytest.approx(2, rel=1e-6)  # each token has one half
    assert result["oracle"] == pytest.approx(1) and result["tokens"] == 200


def test_memories_of_both_against_a_grid(tmp_path):
    """LMs and memories of two saves; the same weights are reported on other text."""
    folders = [random_save(tmp_path / name, seed=seed).folder for seed, name in enumerate(("a", "b"))]
    reports = [random_save(tmp_path / f"r{name.name}", seed=5, start=5000).folder for name in folders]
    weights, results = mix(JointSaves([*map(str, folders)]), JointSaves([*map(str, reports)]))

    def log_probs(saves):
        opened = [(SavedScores.open([save]), SavedScores.open([own])) for save, own in zip(saves, folders)]
        return np.concatenate([stack(save, memory_scores(save, tune(own))) for save, own in opened])

    assert len(weights) == 6 and weights.sum() == pytest.approx(1)
    random = np.random.default_rng(0).dirichlet([0.5] * 6, 2000)
    tuned = log_probs(folders)
    ours = mixture_log_probs(tuned, weights).mean()
    assert max(mixture_log_probs(tuned, tried).mean() for tried in random) <= ours
    assert results[0].mixture == pytest.approx(np.exp(-ours))
    assert results[1].mixture == pytest.approx(np.exp(-mixture_log_probs(log_probs(reports), weights).mean()))


def test_parts_of_one_run(tmp_path, capsys):
    whole = lm_save(tmp_path / "whole", [0.5] * 30)
    first, second = lm_save(tmp_path / "p0", [0.1] * 10, "b"), lm_save(tmp_path / "p1", [0.1] * 20, "b", start=10)
    assert knnlm("mix", whole, f"{second},{first}") == 0
    output = capsys.readouterr().out
    assert f"LM of {whole}" in output and "1.0000" in output and "no test result" in output


def test_refused(tmp_path, capsys):
    a, b = lm_save(tmp_path / "a", [0.5] * 10), lm_save(tmp_path / "b", [0.5] * 10, "b")
    assert "needs two or more" in error_of(capsys, "mix", a)
    other = lm_save(tmp_path / "other", [0.5] * 10, "b", tokens=[1] * 10)
    assert "are of different tokens (10 and 10)" in error_of(capsys, "mix", a, other)
    shorter = lm_save(tmp_path / "shorter", [0.5] * 9, "b")
    assert "are of different tokens (10 and 9)" in error_of(capsys, "mix", a, shorter)
    foreign = lm_save(tmp_path / "foreign", [0.5] * 10, "b", dictionary="f")
    assert "have different dictionaries" in error_of(capsys, "mix", a, foreign)
    test = [lm_save(tmp_path / f"test{c}", [0.5] * 10, c, start=20, split="test") for c in "ab"]
    assert "no test result" in error_of(capsys, "mix", *test)
    assert "as many saves as are mixed, 2" in error_of(capsys, "mix", a, b, "--report", *test, test[0])
    assert "of another checkpoint" in error_of(capsys, "mix", a, b, "--report", test[1], test[0])
    assert "those that were tuned on" in error_of(capsys, "mix", a, b, "--report", a, b)
    assert knnlm("mix", a, b, "--report", *test) == 0
    assert "is not a save" in error_of(capsys, "mix", a, tmp_path / "nothing")
