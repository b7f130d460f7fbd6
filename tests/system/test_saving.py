"""Saves of real runs: what they say of other settings is what a run with these gives."""

import json
import math
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from commands import error_of, eval_lm_here, knnlm

from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.saved_runs.format import SavePart
from fairseq_knnlm.saved_runs.scores import SavedScores
from fairseq_knnlm.saved_runs.settings import Settings, evaluate
from fairseq_knnlm.saved_runs.sweeps import sweep
from fairseq_knnlm.saved_runs.tuning import tune


@pytest.fixture(scope="module")
def knn(dump):
    return ["--knn-datastore", dump("train"), "--knn-k", "64", "--knn-cache-size", "100"]


@pytest.fixture(scope="module")
def save(knn, corpus, adaptive_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saves") / "valid"
    result = eval_lm_here(corpus, adaptive_model, "--gen-subset", "valid", *knn, "--knn-save", folder)
    return SimpleNamespace(folder=folder, loss=float(result["loss"]))


def evaluate_here(data, model, *flags) -> SimpleNamespace:
    return SimpleNamespace(loss=float(eval_lm_here(data, model, "--gen-subset", "valid", *flags)["loss"]))


def evaluate_mixture(evidence, choice) -> float:
    return evaluate(evidence, choice).mixture


def test_the_saved_run_is_reproduced(save):
    evidence = SavedScores.open([save.folder])
    result = evaluate(evidence, Settings.of_run(evidence))
    assert math.log2(result.mixture) == pytest.approx(save.loss, abs=1e-4)
    assert result.mixture == pytest.approx(evidence.run.perplexity, rel=1e-4)


def test_tuned_perplexity_equals_a_real_run(save, knn, evaluate, corpus, adaptive_model, capsys):
    assert knnlm("tune", save.folder) == 0
    output = capsys.readouterr().out
    flags = next(line for line in output.splitlines() if line.startswith("--knn-")).split()
    expected = float(re.search(r"a perplexity of ([\d.]+)", output)[1].rstrip("."))
    real = evaluate(corpus, adaptive_model, *knn, *flags)
    assert 2**real.loss == pytest.approx(expected, rel=1e-4)
    assert real.loss < save.loss


@pytest.mark.parametrize(
    "knob, flag, values",
    [
        ("lambda", "--knn-lambda", [0.1, 0.6]),
        ("temperature", "--knn-temperature", [0.5, 20]),
        ("k", "--knn-k", [1, 16]),
        ("cache-lambda", "--knn-cache-lambda", [0, 0.4]),
        ("cache-theta", "--knn-cache-theta", [0.01, 1]),
        ("cache-size", "--knn-cache-size", [5, 50]),
    ],
)
def test_sweeps_agree_with_separate_runs(save, knn, evaluate, corpus, adaptive_model, knob, flag, values):
    evidence = SavedScores.open([save.folder])
    for row in sweep(evidence, knob, values, Settings.of_run(evidence)):
        value = str(int(row.value) if "k" in knob.split("-") or knob == "cache-size" else row.value)
        real = evaluate(corpus, adaptive_model, *knn, flag, value)
        assert math.log2(row.result.mixture) == pytest.approx(real.loss, abs=2e-4)
        hits = float(re.search(r"hit rate ([\d.]+) in store", real.log)[1])
        assert row.result.hit_rate == pytest.approx(hits, abs=1e-4)
        effective = float(re.search(r"([\d.]+) effective", real.log)[1])
        assert row.result.effective_neighbors == pytest.approx(effective, abs=0.06)
        oracle = float(re.search(r"oracle perplexity ([\d.]+)", real.log)[1])
        assert row.result.oracle == pytest.approx(oracle, rel=2e-3)


def test_saved_in_parts(save, knn, evaluate, corpus, adaptive_model, tmp_path):
    for part in "012":
        flags = ["--num-shards", "3", "--shard-id", part, "--knn-save", tmp_path / part]
        evaluate(corpus, adaptive_model, *knn, *flags)
    parts = SavedScores.open([tmp_path / part for part in "102"])
    whole = SavedScores.open([save.folder])
    np.testing.assert_array_equal(parts.tokens, whole.tokens)
    choice = Settings.of_run(whole)
    assert evaluate_mixture(parts, choice) == pytest.approx(evaluate_mixture(whole, choice), rel=1e-5)


def test_save_with_every_entry(knn, corpus, adaptive_model, tmp_path, capsys):
    """With k = all there is no list of neighbours, but log-probabilities at nine temperatures."""
    flags = [*knn[:2], "--knn-k", "all", "--knn-temperature", "5", "--knn-save", tmp_path / "save"]
    real = evaluate_here(corpus, adaptive_model, *flags)
    evidence = SavedScores.open([tmp_path / "save"])
    assert math.log2(evaluate_mixture(evidence, Settings.of_run(evidence))) == pytest.approx(real.loss, abs=1e-4)
    rows = sweep(evidence, "temperature", None, Settings.of_run(evidence))
    assert [row.value for row in rows] == [1.25, 1.76775, 2.5, 3.5355, 5, 7.071, 10, 14.142, 20]
    other = evaluate_here(corpus, adaptive_model, *knn[:2], "--knn-k", "all", "--knn-temperature", "14.142")
    assert math.log2(rows[7].result.mixture) == pytest.approx(other.loss, abs=1e-4)
    best = tune(evidence)
    assert evaluate(evidence, best).mixture <= min(row.result.mixture for row in rows)
    rounded = Settings.of_run(evidence).at_temperature(3.536)  # as flags are printed
    assert evaluate_mixture(evidence, rounded) == pytest.approx(rows[3].result.mixture)
    assert "no k" in error_of(capsys, "sweep", tmp_path / "save", "--over", "k")
    assert "were saved, not 3" in error_of(capsys, "sweep", tmp_path / "save", "--over", "temperature", "--values", "3")
    assert "no cache" in error_of(capsys, "sweep", tmp_path / "save", "--over", "cache-theta")
    assert knnlm("tune", tmp_path / "save") == 0
    assert "--knn-k all" in capsys.readouterr().out


def test_saves_of_other_runs_do_not_mix(save, knn, evaluate, corpus, adaptive_model, tmp_path, capsys):
    evaluate(corpus, adaptive_model, *knn, "--knn-save", tmp_path / "test", split="test")
    assert "different runs" in error_of(capsys, "sweep", save.folder, tmp_path / "test", "--over", "k")


def test_save_of_the_bare_lm(evaluate, corpus, adaptive_model, tmp_path, capsys):
    real = evaluate(corpus, adaptive_model, "--knn-save", tmp_path / "save")
    evidence = SavedScores.open([tmp_path / "save"])
    assert math.log2(evaluate_mixture(evidence, Settings(()))) == pytest.approx(real.loss, abs=1e-5)
    assert "nothing to tune" in error_of(capsys, "tune", tmp_path / "save")
    assert "no datastore" in error_of(capsys, "sweep", tmp_path / "save", "--over", "lambda")


def test_save_on_a_full_disk(corpus, adaptive_model, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(KnnlmError, match="free some space"):
        eval_lm_here(corpus, adaptive_model, "--gen-subset", "valid", "--knn-save", tmp_path / "save")
    assert not list(tmp_path.iterdir())


def test_infinite_perplexity_is_a_result(corpus, adaptive_model, dump, tmp_path, caplog, capsys):
    caplog.set_level("INFO")
    flags = ["--knn-datastore", dump("train"), "--knn-k", "1", "--knn-save", tmp_path / "save"]
    result = eval_lm_here(corpus, adaptive_model, "--gen-subset", "valid", *flags, "--knn-lambda", "1")
    assert float(result["perplexity"]) == np.inf and "mixture perplexity inf" in caplog.text
    assert SavePart.open(tmp_path / "save").run.perplexity == "inf"
    assert knnlm("tune", tmp_path / "save") == 0
    assert "inf" in capsys.readouterr().out
    page = tmp_path / "page.html"
    model = ["--path", adaptive_model, "--data", corpus]
    inspect = ["inspect", *model, "--datastore", dump("train"), "--knn-k", "1", "--knn-lambda", "1", "--text", "w1 w9"]
    assert knnlm(*inspect, "-o", page) == 0
    assert "inf kNN-LM" in capsys.readouterr().out
    embedded = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)[1]
    assert json.loads(embedded, parse_constant=pytest.fail)["about"]["mix"] == "inf"


def test_a_save_says_which_index_was_used(corpus, adaptive_model, dump, tmp_path):
    store = dump("train")
    flags = ["--knn-datastore", store, "--knn-save", tmp_path / "save", "--gen-subset", "valid"]
    eval_lm_here(corpus, adaptive_model, *flags)
    (memory,) = SavePart.open(tmp_path / "save").run.memories
    assert memory.identity["index"] == "auto"
