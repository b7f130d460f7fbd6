"""knnlm tune and knnlm sweep, on saves of random similarities."""

import json

import pytest
from commands import error_of, fails_with, knnlm, run
from saves import random_save

from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.saved_runs.scores import SavedScores
from fairseq_knnlm.saved_runs.settings import Settings, evaluate


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


def test_report_on_other_text(tmp_path, capsys):
    tuned = random_save(tmp_path / "valid", seed=1).folder
    test = random_save(tmp_path / "test", split="test", start=5000, seed=2).folder
    assert knnlm("tune", tuned, "--report", test, "--json") == 0
    output = json.loads(capsys.readouterr().out)
    choice = Settings(
        tuple(output["weights"]), output["k"], (output["temperature"],), output["cache_size"], output["theta"]
    )
    expected = evaluate(SavedScores.open([test]), choice).mixture
    assert output["results"]["test, report"]["mixture"] == pytest.approx(expected)
    assert knnlm("tune", tuned) == 0
    text = capsys.readouterr().out
    assert "no test result" in text and output["flags"] in text


def test_leaving_a_memory_out(tmp_path, capsys):
    save = random_save(tmp_path / "save").folder
    assert knnlm("tune", save, "--without", "cache", "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert len(output["weights"]) == 1 and "cache" not in output["flags"]
    without = SavedScores.open([save], without=("cache",))
    whole = SavedScores.open([save])
    weight, k, temperature = output["weights"][0], output["k"], output["temperature"]
    expected = evaluate(whole, Settings((weight, 0.0), k, (temperature,), 24, 0.5)).mixture
    assert evaluate(without, Settings((weight,), k, (temperature,))).mixture == pytest.approx(expected)
    assert "no memory knn7" in error_of(capsys, "tune", save, "--without", "knn7")


def test_lambda_is_swept_as_far_as_the_cache_leaves_room(tmp_path, capsys):
    save = random_save(tmp_path / "save").folder
    assert knnlm("sweep", save, "--over", "lambda") == 0  # the cache has 0.1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["0.85", "0.9"]
    assert knnlm("sweep", save, "--over", "cache-lambda") == 0  # the datastore has 0.25
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "0.75"


def test_keeping_needs_a_datastore(tmp_path, capsys):
    save = random_save(tmp_path / "save").folder
    assert "does not say where the datastore knn0 is" in error_of(capsys, "tune", save, "--keep")
    assert "is not a datastore" in error_of(capsys, "tune", save, "--keep", "--datastore", tmp_path)
    assert "names 2 datastores" in error_of(capsys, "tune", save, "--keep", "--datastore", "a,b")
    assert "add --keep" in error_of(capsys, "tune", save, "--datastore", tmp_path)
    assert "no datastore to keep" in error_of(capsys, "tune", save, "--keep", "--without", "knn0")
    assert knnlm("tune", save) == 0
    assert "With --keep these values are stored" in capsys.readouterr().out


def test_sweep_files(tmp_path, capsys):
    save = random_save(tmp_path / "save").folder
    files = [tmp_path / f"out/k.{kind}" for kind in ("csv", "json", "svg", "png")]
    assert knnlm("sweep", save, "--over", "k", "--best-lambda", "-o", *files) == 0
    output = capsys.readouterr()
    assert "best lambda" in output.out and "findfont" not in output.err
    rows = json.loads(files[1].read_text())
    assert [row["k"] for row in rows] == [1, 2, 4, 8, 16]
    assert len(files[0].read_text().splitlines()) == 6
    assert files[2].read_text().startswith("<?xml") and files[3].read_bytes().startswith(b"\x89PNG")


def test_a_failing_command_shows_one_sentence(tmp_path):
    """The command as a process: the sentence on standard error, and no traceback."""
    fails_with(run("knnlm", "tune", tmp_path, check=False), "is not a save")
