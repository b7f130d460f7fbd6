"""The recipe of sparse prototypes: its sentences, its page, and all of it at the smallest size."""

import gzip
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import REPO, run

SCRIPTS = REPO / "examples/prototypes"
WORDS = ["Apples", "are", "red", "green", "and", "pears", "were", "sweet", "sour", "old", "new", "ripe", "or", "not"]


def write_text(path: Path, lines: int, seed: int) -> Path:
    """Paragraphs of sentences of 3 to 24 tokens, gzipped."""
    rng = np.random.default_rng(seed)
    text = []
    for _ in range(lines):
        sentences = [["The", *rng.choice(WORDS[1:], rng.integers(1, 22)), "."] for _ in range(4)]
        text.append(" ".join(word for sentence in sentences for word in sentence))
    path.write_bytes(gzip.compress("\n".join(text).encode()))
    return path


@pytest.fixture
def texts(tmp_path) -> list[object]:
    return [
        "--train", write_text(tmp_path / "train.gz", 400, 1), "--valid", write_text(tmp_path / "valid.gz", 100, 2),
    ]  # fmt: skip


def test_sentences(texts, tmp_path):
    """Of the right length, none twice, the same each time."""
    made = []
    for name in ("one", "two"):
        command = [sys.executable, SCRIPTS / "sentences.py", tmp_path / name, *texts, "--count", 150, "--held-out", 30]
        run(*command)
        files = {split: tmp_path / name / f"{split}.txt" for split in ("train", "valid", "test")}
        made.append({split: path.read_text().splitlines() for split, path in files.items()})
    assert made[0] == made[1]
    assert {split: len(lines) for split, lines in made[0].items()} == {"train": 150, "valid": 30, "test": 30}
    everything = [line for lines in made[0].values() for line in lines]
    assert len(set(everything)) == len(everything)
    assert all(5 <= len(line.split()) <= 20 and line.endswith(" .") and line.islower() for line in everything)


def test_the_page_comes_from_the_json(tmp_path):
    score = {"perplexity": 50.0, "sentences_per_second": 200.0, "bytes": 4000}
    words = {"prototypes": 2000, "kept": [{"class": "ranks 1 to 100", "words": 5, "kept": 0.25}]}
    about = {"sentences": 100, "tokens": 1500}
    exact = {"sentences_per_second": 0.5, "bytes": 960000}
    rows = {
        "LM": {**about, "rows": [score]},
        "dense editor": {**about, "rows": [score], "active": 1800, "exact": exact, "words": words},
        "sparse editor, alpha 0.1": {
            **about, "rows": [score] * 4, "active": 20, "words": words,
            "exact": {"sentences_per_second": 40.0, "bytes": 9600},
        },
    }  # fmt: skip
    size = {"count": 2000, "top": 10, "rest": 10, "samples": 3}
    content = {"results": {"text": "old songs", "size": size, "rows": rows}}
    (tmp_path / "prototypes_songs.json").write_text(json.dumps(content))
    run(sys.executable, SCRIPTS / "run.py", "--report", "--out", tmp_path, "--name", "prototypes_songs")
    page = (tmp_path / "prototypes_songs.md").read_text()
    assert page.startswith("## Sparse prototypes (He et al. 2020): old songs\n")
    assert "| sparse editor, alpha 0.1 | 50.00 | 50.00 | 50.00 | 50.00 | 20 | 1.0% | 40.00 | 80.0 | 10 |" in page
    assert "| dense editor | 25.0% |" in page


def test_a_text_is_needed(texts, tmp_path):
    def error(*flags: object) -> str:
        return run(sys.executable, SCRIPTS / "run.py", tmp_path / "work", *flags, check=False).stderr

    assert "--train and --valid, or else --sentences" in error()
    assert "--train and --valid, or else --sentences" in error(*texts, "--sentences", tmp_path)
    assert f"there is no {tmp_path}/train.txt" in error("--sentences", tmp_path)


@pytest.mark.slow
def test_all_of_it(texts, tmp_path):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    flags = [*texts, "--size", "toy", "--count", 150, "--epochs", 1, "--alphas", "0.1"]
    command = [sys.executable, SCRIPTS / "run.py", tmp_path / "work", *flags]
    run(*command, env=environment)
    content = json.loads((tmp_path / "work/results/prototypes.json").read_text())
    assert list(content["results"]["rows"]) == [
        "LM", "LM, twice the epochs", "dense editor", "sparse editor, alpha 0.1",
    ]  # fmt: skip
    assert all(str(tmp_path) not in command for command in content["commands"])
    again = run(*command, env=environment)
    assert not re.findall(r"^\$ ", again.stderr, re.MULTILINE)  # nothing is run again
