"""The fair comparison at toy size: interrupted, continued, and its page."""

import json
import re
import subprocess
import sys

import pytest
from commands import REPO


@pytest.mark.slow
def test_comparison(corpus, adaptive_model, tmp_path):
    """All rows and factors; a training that was interrupted continues; a second call runs nothing again."""
    command = [
        sys.executable, REPO / "examples/spalm/compare.py", "--key-lm", adaptive_model, "--dict", corpus / "dict.txt",
        "--train", corpus.parent / "train.txt", "--valid", corpus.parent / "valid.txt", "--train-tokens", "6000",
        "--work", tmp_path / "work", "--out", tmp_path / "out", "--seeds", "1", "--updates", "12",
        "--factor-updates", "3", "--points", "2", "--layers", "1", "--dim", "16", "--ffn-dim", "32", "--heads", "2",
        "--segment", "16", "--memory", "16", "--cutoffs", "50,120", "--key-context", "64,32", "--recall", "200",
        "--large-window", "200", "--factors", "sum-norm,window-large,k-1",
    ]  # fmt: skip

    def run() -> str:
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=REPO, check=False)
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
        return result.stdout

    output = run()
    assert re.search(r"SPALM \+ kNN +[\d.]+ +[\d.]+", output)
    results = json.loads((tmp_path / "out/spalm_words.json").read_text())
    assert set(results["scores"]) == {"xl", "xl + kNN", "spalm", "spalm + kNN"}
    assert all(set(sizes) == {"1x", "6x"} and set(sizes["6x"]) == {"1"} for sizes in results["scores"].values())
    assert set(results["factors"]) == {"literal", "sum-norm", "window-large", "k-1", "xl"}
    assert [updates for updates, _ in results["curves"]["spalm-1"]] == [6, 12]
    assert len(results["recall"]["valid"]) == 6 and results["train_tokens"] < 6000
    trained = results["steps"]["train-spalm-1"]
    assert trained["seed"] == 1 and "fairseq-train" in trained["command"] and str(tmp_path) not in trained["command"]
    assert not (tmp_path / "work/keys-of-xl-1").exists()
    steps = json.loads((tmp_path / "work/steps.json").read_text())
    del steps["train-xl-1"]
    (tmp_path / "work/steps.json").write_text(json.dumps(steps))
    again = run()
    # It finds its last checkpoint, and has nothing left to do.
    assert re.findall(r"^\[(\S+)\] took", again, re.MULTILINE) == ["train-xl-1"]
