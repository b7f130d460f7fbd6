"""Saves, tuning and sweeps: against brute force on random saves, and against real runs."""

import json
import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import fails_with, run

from fairseq_knnlm import cli
from fairseq_knnlm.analysis.choice import Choice, evaluate, with_best_weights
from fairseq_knnlm.analysis.evidence import Evidence
from fairseq_knnlm.analysis.sweep import sweep
from fairseq_knnlm.analysis.tune import tune
from fairseq_knnlm.analysis.weights import best_weights, mixture_log_probs
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.save import MemoryFacts, RunFacts, SaveWriter, bytes_per_token

# --- random saves ---------------------------------------------------------------------------------------------------


def random_save(folder, count=400, k=16, size=24, scale=1.0, split="valid", start=0, seed=0):
    """A save of random similarities in which matching neighbours tend to be nearer; returns what went into it."""
    rng = np.random.default_rng(seed)
    memories = [
        MemoryFacts("knn0", k, 0.25, 1.0, {"keys": "a", "entries": 1000}),
        MemoryFacts("cache", size, 0.1, 0.5, {"boundary": None}),
    ]
    facts = {"split": split, "data_sha256": "d", "checkpoint_sha256": "c", "dictionary_sha256": "e"}
    writer = SaveWriter(folder, RunFacts(facts, start, start + count, 10_000, memories))
    lm = torch.from_numpy(rng.uniform(-8, -1, count).astype(np.float32))
    kept = {}
    for name, width in (("knn0", k), ("cache", size)):
        matches = rng.random((count, width)) < 0.3
        near = -rng.gamma(4.0, 2.0, (count, width)) + 2.0 * matches
        near[rng.random((count, width)) < 0.05] = -np.inf  # absent
        near[3:4] = -np.inf
        if name == "knn0":  # best first, as engines return them
            order = np.argsort(-near, axis=1)
            near, matches = np.take_along_axis(near, order, 1), np.take_along_axis(matches, order, 1)
        matches &= np.isfinite(near)
        near = torch.from_numpy((scale * near).astype(np.float32))
        kept[name] = (near.double().numpy() / scale, matches)
        for rows in torch.arange(count).split(150):
            writer.add_neighbors(name, near[rows], torch.from_numpy(matches)[rows])
    writer.add(lm, torch.zeros(count, dtype=torch.long))
    writer.finish(perplexity=1.0)
    return SimpleNamespace(folder=folder, lm=lm.double().numpy(), **kept)


def brute_force(near, matches, k, sharpness):
    """p of the target with the first k neighbours."""
    near, matches = near[:, :k], matches[:, :k]
    with np.errstate(invalid="ignore"):
        weights = np.nan_to_num(np.exp(sharpness * (near - near.max(axis=1, keepdims=True))))
        return np.nan_to_num((weights * matches).sum(axis=1) / weights.sum(axis=1))


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-3])
def test_scores_from_a_save(tmp_path, scale):
    """Half precision is enough whatever the distances' magnitude."""
    made = random_save(tmp_path / "save", scale=scale)
    evidence = Evidence.open([made.folder])
    for k in (1, 5, 16):
        for sharpness in (0.1, 1.0, 4.0):
            expected = brute_force(*made.knn0, k, sharpness)
            ours = evidence.scores("knn0", k, sharpness / scale)
            np.testing.assert_allclose(np.exp(ours.log_probs), expected, atol=5e-4)
            np.testing.assert_array_equal(ours.hits, made.knn0[1][:, :k].any(axis=1))
    several = evidence.log_probs_for_all_k("knn0", [1, 5, 16], 1.0 / scale)
    for row, k in zip(several, (1, 5, 16)):
        np.testing.assert_allclose(np.exp(row), brute_force(*made.knn0, k, 1.0), atol=5e-4)


def test_result_line(tmp_path):
    made = random_save(tmp_path / "save")
    evidence = Evidence.open([made.folder])
    result = evaluate(evidence, Choice((0.3, 0.2), 8, 2.0, 24, 0.25))
    knn, cache = brute_force(*made.knn0, 8, 0.5), brute_force(*made.cache, 24, 0.25)
    lm = np.exp(made.lm)
    assert result.lm == pytest.approx(np.exp(-made.lm.mean()), rel=1e-5)
    assert result.mixture == pytest.approx(np.exp(-np.log(0.5 * lm + 0.3 * knn + 0.2 * cache).mean()), rel=1e-4)
    assert result.oracle == pytest.approx(np.exp(-np.log(np.max([lm, knn, cache], axis=0)).mean()), rel=1e-3)
    assert result.hit_rate == pytest.approx(made.knn0[1][:, :8].any(axis=1).mean())
    near = made.knn0[0][:, :8]
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.nan_to_num(np.exp(0.5 * (near - near.max(axis=1, keepdims=True))))
        weights /= weights.sum(axis=1, keepdims=True)
        entropy = -np.nan_to_num(weights * np.log(weights)).sum(axis=1)
    assert result.effective_neighbors == pytest.approx(np.exp(entropy.mean()), rel=1e-3)


def test_bytes_per_token(tmp_path):
    made = random_save(tmp_path / "save", count=1000)
    evidence = Evidence.open([made.folder])
    on_disk = sum(path.stat().st_size for path in made.folder.glob("*.npy"))
    assert on_disk == pytest.approx(1000 * bytes_per_token(evidence.run), rel=0.05)


def test_best_weights_reach_the_grid_optimum():
    rng = np.random.default_rng(0)
    log_probs = np.log(rng.dirichlet([0.3] * 3, 5000).T + 1e-9) + rng.normal(size=(3, 1))
    grid = [
        (a, b, 1 - a - b) for a in np.linspace(0, 1, 101) for b in np.linspace(0, 1, 101) if a + b <= 1 + 1e-12
    ]
    best = max(mixture_log_probs(log_probs, np.array(weights)).mean() for weights in grid)
    weights = best_weights(log_probs)
    assert weights.sum() == pytest.approx(1) and (weights >= 0).all()
    ours = mixture_log_probs(log_probs, weights).mean()
    assert best <= ours + 1e-9 and ours - best < 1e-3


@pytest.mark.parametrize("useless", [-50.0, -np.inf])
def test_best_weights_at_the_edge(useless):
    """A member that never helps gets nothing, and that ends the search in time."""
    log_probs = np.stack([np.full(1000, -2.0), np.full(1000, useless)])
    np.testing.assert_allclose(best_weights(log_probs), [1, 0], atol=1e-6)
    log_probs[1] = -1.0
    np.testing.assert_allclose(best_weights(log_probs), [0, 1], atol=1e-6)


def test_tune_reaches_the_grid_optimum(tmp_path):
    evidence = Evidence.open([random_save(tmp_path / "save", count=1500).folder])
    ours = evaluate(evidence, tune(evidence)).mixture
    best = min(
        evaluate(evidence, with_best_weights(evidence, Choice((0, 0), k, temperature, size, theta))).mixture
        for k in (4, 8, 16)
        for temperature in (0.5, 1, 2, 4, 8)
        for size in (12, 24)
        for theta in (0.1, 0.25, 0.5, 1)
    )
    assert ours < best * 1.0005


def test_parts_are_one_run(tmp_path):
    first = random_save(tmp_path / "a", start=0, seed=1)
    second = random_save(tmp_path / "b", start=400, seed=2)
    both = Evidence.open([second.folder, first.folder])
    np.testing.assert_array_equal(both.lm, np.concatenate([first.lm, second.lm]))
    with pytest.raises(KnnlmError, match="same tokens"):
        Evidence.open([first.folder, first.folder])


def error_of(capsys, *arguments) -> str:
    """The one sentence that a knnlm command fails with."""
    assert cli.main(list(map(str, arguments))) == 1
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    return error


def test_bad_saves(tmp_path, capsys):
    save = random_save(tmp_path / "save").folder
    assert "is not a save" in error_of(capsys, "tune", tmp_path / "nothing")
    other = random_save(tmp_path / "other", start=400, k=8).folder
    assert "different runs (memories)" in error_of(capsys, "tune", save, other)
    assert "16 were saved" in error_of(capsys, "sweep", save, "--over", "k", "--values", "32")
    fixed = ["sweep", save, "--over", "lambda"]
    assert "leave out one of the two" in error_of(capsys, *fixed, "--best-lambda")
    both = ["sweep", save, "--over", "k", "--lambda", "0.2", "--best-lambda"]
    assert "leave out one of the two" in error_of(capsys, *both)
    assert "would fix what is swept over" in error_of(capsys, *fixed, "--lambda", "0.2")
    assert "no knob" in error_of(capsys, "sweep", save, "--over", "nprobe")
    assert "between 0 and 1" in error_of(capsys, "sweep", save, "--over", "lambda", "--values", "0.95")
    assert "end it in" in error_of(capsys, "sweep", save, "--over", "lambda", "-o", "plot.gif")
    assert "not a number" in error_of(capsys, "sweep", save, "--over", "k", "--values", "many")
    empty = random_save(tmp_path / "empty", count=0).folder
    assert "is empty" in error_of(capsys, "tune", empty)
    test = random_save(tmp_path / "test", split="test").folder
    assert "no test result" in error_of(capsys, "tune", test)
    assert "those that were tuned on" in error_of(capsys, "tune", save, "--report", save)
    (save / "knn0.gaps.npy").write_bytes((save / "knn0.gaps.npy").read_bytes()[:1000])
    assert "truncated" in error_of(capsys, "tune", save)
    with pytest.raises(KnnlmError, match="exists already"):
        random_save(tmp_path / "other")


def test_a_killed_save_is_no_save(tmp_path):
    writer = SaveWriter(tmp_path / "save", RunFacts({"split": "valid"}, 0, 10, 10, []))
    writer.add(torch.zeros(5), torch.zeros(5))
    assert not (tmp_path / "save").exists()
    again = SaveWriter(tmp_path / "save", RunFacts({"split": "valid"}, 0, 5, 5, []))
    again.add(torch.zeros(5), torch.zeros(5))
    again.finish(1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["save"]


def test_report_on_other_text(tmp_path, capsys):
    tuned = random_save(tmp_path / "valid", seed=1).folder
    test = random_save(tmp_path / "test", split="test", start=5000, seed=2).folder
    assert cli.main(["tune", str(tuned), "--report", str(test), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    choice = Choice(tuple(output["weights"]), output["k"], output["temperature"], output["cache_size"], output["theta"])
    expected = evaluate(Evidence.open([test]), choice).mixture
    assert output["results"]["test, report"]["mixture"] == pytest.approx(expected)
    assert cli.main(["tune", str(tuned)]) == 0
    text = capsys.readouterr().out
    assert "no test result" in text and output["flags"] in text


def test_leaving_a_memory_out(tmp_path, capsys):
    save = random_save(tmp_path / "save").folder
    assert cli.main(["tune", str(save), "--without", "cache", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert len(output["weights"]) == 1 and "cache" not in output["flags"]
    without = Evidence.open([save], without=("cache",))
    whole = Evidence.open([save])
    weight, k, temperature = output["weights"][0], output["k"], output["temperature"]
    expected = evaluate(whole, Choice((weight, 0.0), k, temperature, 24, 0.5)).mixture
    assert evaluate(without, Choice((weight,), k, temperature)).mixture == pytest.approx(expected)
    assert "no memory knn7" in error_of(capsys, "tune", save, "--without", "knn7")


def test_sweep_files(tmp_path, capsys):
    save = random_save(tmp_path / "save").folder
    files = [tmp_path / f"out/k.{kind}" for kind in ("csv", "json", "svg", "png")]
    assert cli.main(["sweep", str(save), "--over", "k", "--best-lambda", "-o", *map(str, files)]) == 0
    output = capsys.readouterr()
    assert "best lambda" in output.out and "findfont" not in output.err
    rows = json.loads(files[1].read_text())
    assert [row["k"] for row in rows] == [1, 2, 4, 8, 16]
    assert len(files[0].read_text().splitlines()) == 6
    assert files[2].read_text().startswith("<?xml") and files[3].read_bytes().startswith(b"\x89PNG")


# --- real runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def knn(dump):
    return ["--knn-datastore", dump("train"), "--knn-k", "64", "--knn-cache-size", "100"]


@pytest.fixture(scope="module")
def save(knn, corpus, adaptive_model, tmp_path_factory):
    from conftest import eval_lm_here

    folder = tmp_path_factory.mktemp("saves") / "valid"
    result = eval_lm_here(corpus, adaptive_model, "--gen-subset", "valid", *knn, "--knn-save", folder)
    return SimpleNamespace(folder=folder, loss=float(result["loss"]))


def test_the_saved_run_is_reproduced(save):
    evidence = Evidence.open([save.folder])
    result = evaluate(evidence, Choice.of_run(evidence))
    assert math.log2(result.mixture) == pytest.approx(save.loss, abs=1e-4)
    assert result.mixture == pytest.approx(evidence.run.perplexity, rel=1e-4)


def test_tuned_perplexity_equals_a_real_run(save, knn, evaluate, corpus, adaptive_model, capsys):
    assert cli.main(["tune", str(save.folder)]) == 0
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
    evidence = Evidence.open([save.folder])
    for row in sweep(evidence, knob, values, Choice.of_run(evidence)):
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
    parts = Evidence.open([tmp_path / part for part in "102"])
    whole = Evidence.open([save.folder])
    np.testing.assert_array_equal(parts.tokens, whole.tokens)
    choice = Choice.of_run(whole)
    assert evaluate_mixture(parts, choice) == pytest.approx(evaluate_mixture(whole, choice), rel=1e-5)


def evaluate_here(data, model, *flags) -> SimpleNamespace:
    from conftest import eval_lm_here

    return SimpleNamespace(loss=float(eval_lm_here(data, model, "--gen-subset", "valid", *flags)["loss"]))


def evaluate_mixture(evidence, choice) -> float:
    return evaluate(evidence, choice).mixture


def test_save_with_every_entry(knn, corpus, adaptive_model, tmp_path, capsys):
    """With k = all there is no list of neighbours, but log-probabilities at nine temperatures."""
    flags = [*knn[:2], "--knn-k", "all", "--knn-temperature", "5", "--knn-save", tmp_path / "save"]
    real = evaluate_here(corpus, adaptive_model, *flags)
    evidence = Evidence.open([tmp_path / "save"])
    assert math.log2(evaluate_mixture(evidence, Choice.of_run(evidence))) == pytest.approx(real.loss, abs=1e-4)
    rows = sweep(evidence, "temperature", None, Choice.of_run(evidence))
    assert [row.value for row in rows] == [1.25, 1.76775, 2.5, 3.5355, 5, 7.071, 10, 14.142, 20]
    other = evaluate_here(corpus, adaptive_model, *knn[:2], "--knn-k", "all", "--knn-temperature", "14.142")
    assert math.log2(rows[7].result.mixture) == pytest.approx(other.loss, abs=1e-4)
    best = tune(evidence)
    assert evaluate(evidence, best).mixture <= min(row.result.mixture for row in rows)
    rounded = replace(Choice.of_run(evidence), temperature=3.536)  # as flags are printed
    assert evaluate_mixture(evidence, rounded) == pytest.approx(rows[3].result.mixture)
    assert "no k" in error_of(capsys, "sweep", tmp_path / "save", "--over", "k")
    assert "were saved, not 3" in error_of(capsys, "sweep", tmp_path / "save", "--over", "temperature", "--values", "3")
    assert "no cache" in error_of(capsys, "sweep", tmp_path / "save", "--over", "cache-theta")
    assert cli.main(["tune", str(tmp_path / "save")]) == 0
    assert "--knn-k all" in capsys.readouterr().out


def test_saves_of_other_runs_do_not_mix(save, knn, evaluate, corpus, adaptive_model, tmp_path, capsys):
    evaluate(corpus, adaptive_model, *knn, "--knn-save", tmp_path / "test", split="test")
    assert "different runs" in error_of(capsys, "sweep", save.folder, tmp_path / "test", "--over", "k")


def test_save_of_the_bare_lm(evaluate, corpus, adaptive_model, tmp_path, capsys):
    real = evaluate(corpus, adaptive_model, "--knn-save", tmp_path / "save")
    evidence = Evidence.open([tmp_path / "save"])
    assert math.log2(evaluate_mixture(evidence, Choice(()))) == pytest.approx(real.loss, abs=1e-5)
    assert "nothing to tune" in error_of(capsys, "tune", tmp_path / "save")
    assert "no datastore" in error_of(capsys, "sweep", tmp_path / "save", "--over", "lambda")


# --- subsample ------------------------------------------------------------------------------------------------------


def test_subsample(dump, tmp_path, capsys):
    from fairseq_knnlm.datastore import Datastore

    source = dump("train")
    assert cli.main(["subsample", str(source), "--fraction", "0.1", "--seed", "3", "-o", str(tmp_path / "part")]) == 0
    whole, part = Datastore(source), Datastore(tmp_path / "part")
    positions = np.load(tmp_path / "part/positions.npy")
    assert len(part) == round(0.1 * len(whole)) == len(np.unique(positions))
    np.testing.assert_array_equal(part.values, whole.values[positions])
    np.testing.assert_array_equal(np.concatenate(list(part.key_blocks())), whole.gather_keys(positions))
    assert run("knnlm", "verify", tmp_path / "part").returncode == 0
    # nothing is shared: the copy survives the original, and the original any damage to the copy
    files = {path.stat().st_ino for path in source.rglob("*")} & {path.stat().st_ino for path in part.folder.rglob("*")}
    assert not files
    again = tmp_path / "again"
    assert cli.main(["subsample", str(source), "--fraction", "0.1", "--seed", "3", "-o", str(again)]) == 0
    assert Datastore(again).fingerprint == part.fingerprint
    assert "another dump" in error_of(capsys, "subsample", source, "--fraction", "0.2", "-o", again)
    assert "above 0" in error_of(capsys, "subsample", source, "--fraction", "0", "-o", tmp_path / "x")
    assert "is none" in error_of(capsys, "subsample", source, "--fraction", "1e-9", "-o", tmp_path / "x")
    assert "another folder" in error_of(capsys, "subsample", source, "--fraction", "0.5", "-o", source)


def test_scoring_with_a_subsample(dump, evaluate, corpus, adaptive_model, tmp_path):
    cli.main(["subsample", str(dump("train")), "--fraction", "0.5", "-o", str(tmp_path / "part")])
    part = evaluate(corpus, adaptive_model, "--knn-datastore", tmp_path / "part")
    whole = evaluate(corpus, adaptive_model, "--knn-datastore", dump("train"))
    assert part.loss != whole.loss


def test_bad_cache_and_save_flags(corpus, adaptive_model, dump, tmp_path):
    from conftest import eval_lm_here

    def sentence(*flags) -> str:
        with pytest.raises(KnnlmError) as error:
            eval_lm_here(corpus, adaptive_model, "--gen-subset", "valid", *flags)
        return str(error.value)

    assert "without --knn-cache-size" in sentence("--knn-cache-theta", "2")
    assert "0 or more" in sentence("--knn-cache-size", "-5")
    assert "0 or more" in sentence("--knn-cache-size", "5", "--knn-cache-theta", "-1")
    knn = ["--knn-datastore", dump("train"), "--knn-lambda", "0.8"]
    assert "at most 1 together" in sentence(*knn, "--knn-cache-size", "5", "--knn-cache-lambda", "0.3")
    assert "not in the dictionary" in sentence("--knn-cache-size", "5", "--knn-cache-boundary", "no such word")
    assert "no line of the text" in sentence("--knn-cache-size", "5", "--knn-cache-boundary", "w1 w1 w1 w1 w1")
    assert "regular expression" in sentence("--knn-cache-size", "5", "--knn-cache-boundary", "re:(")
    assert "are for scoring" in sentence("--knn-dump", tmp_path / "dump", "--knn-cache-size", "5")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("precious")
    assert "exists already" in sentence("--knn-save", tmp_path / "mine")
    assert (tmp_path / "mine/file").read_text() == "precious"


def test_save_on_a_full_disk(corpus, adaptive_model, tmp_path, monkeypatch):
    from conftest import eval_lm_here

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(KnnlmError, match="free some space"):
        eval_lm_here(corpus, adaptive_model, "--gen-subset", "valid", "--knn-save", tmp_path / "save")
    assert not list(tmp_path.iterdir())


def test_a_failing_command_shows_one_sentence(tmp_path):
    fails_with(run("knnlm", "tune", tmp_path, check=False), "is not a save")
