"""The shell recipes, end to end on generated text, and the pages that are made from their results."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from commands import REPO, run
from tiny import write_lines

from fairseq_knnlm.datastore import Datastore


def recipe(script: str, work: Path, **settings) -> str:
    """Run a recipe at small size; its output."""
    settings = {name: str(value) for name, value in settings.items()}
    environment = {**os.environ, "SMALL": "1", "WORK": str(work), **settings}
    return run("bash", REPO / "examples" / script, env=environment).stdout


def table(output: str) -> dict[str, list[float]]:
    """The rows of the table that the recipe ends with: label -> numbers."""
    output = output[output.rindex(" paper\n") :]
    rows = re.findall(r"^(\S.*?)\s{2,}((?:[\d.]+|-)(?:\s+(?:[\d.]+|-))*)\s*$", output, re.MULTILINE)
    return {label: [float(cell) for cell in cells.split() if cell != "-"] for label, cells in rows}


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory) -> Path:
    """Text of WikiText's form: headings between blank lines."""
    folder = tmp_path_factory.mktemp("wikitext")
    for seed, (split, lines) in enumerate([("train", 500), ("valid", 60), ("test", 60)]):
        write_lines(folder / "plain.txt", lines, seed)
        with open(folder / f"wiki.{split}.tokens", "w") as file:
            for number, line in enumerate((folder / "plain.txt").read_text().splitlines()):
                if number % 10 == 0:
                    file.write(f" \n = w{number % 200} = \n \n")
                file.write(f" {line.strip()} \n")
    return folder


@pytest.mark.slow
def test_wikitext103(wikitext, tmp_path):
    output = recipe("wikitext103/run.sh", tmp_path / "work", DATA=wikitext)
    rows = table(output)
    assert list(rows) == ["base LM", "+ kNN", "+ cache", "+ kNN + cache"]
    ours = {label: (numbers[0], numbers[2]) for label, numbers in rows.items()}
    paper = [[17.96, 18.65], [16.06, 16.12], [17.67, 18.27], [15.81, 15.79]]
    assert [numbers[1::2] for numbers in rows.values()] == paper
    assert ours["+ kNN"][0] < ours["base LM"][0] and ours["+ kNN + cache"][0] <= ours["+ kNN"][0] + 0.01
    # every token has an entry, in order: words and ends of lines
    text = (wikitext / "wiki.train.tokens").read_text().splitlines()
    datastore = Datastore(tmp_path / "work/datastore")
    assert len(datastore) == sum(len(line.split()) + 1 for line in text)
    source = datastore.manifest.source
    assert (source["tokens_per_sample"], source["context_window"]) == (96, 48)
    # run again, a script does nothing but print what it printed
    again = recipe("wikitext103/8_test.sh", tmp_path / "work", DATA=wikitext)
    assert table(again) == rows and "done before" in again


@pytest.mark.slow
def test_books(tmp_path, adaptive_model, corpus):
    books = tmp_path / "plain"
    books.mkdir()
    for number in range(5):
        write_lines(books / f"book{number}.txt", 100 if number else 40, number)
        text = (books / f"book{number}.txt").read_text()
        (books / f"book{number}.txt").write_text(text.replace("\n", ".\n\n"))
    settings = {"BOOKS": books, "WIKI_CHECKPOINT": adaptive_model, "WIKI_DICT": corpus / "dict.txt"}
    output = recipe("books/run.sh", tmp_path / "work", **settings)
    output = output[output.rindex(" paper\n") :]
    rows = re.findall(r"^(\S.*?|  \S.*?)\s{2,}([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)$", output, re.MULTILINE)
    assert [row[2] for row in rows] == ["14.75", "14.20", "37.13", "24.85"]
    for base, knn in (rows[:2], rows[2:]):
        assert float(knn[1]) < float(base[1])
    words = tmp_path / "work/text/words"
    held_out = {split: set((words / f"{split}.txt").read_text().splitlines()) for split in ("train", "valid", "test")}
    assert not held_out["train"] & held_out["valid"] and all(held_out.values())


def test_too_few_books(tmp_path):
    (tmp_path / "one.txt").write_text("w1 w2\n")
    result = run(sys.executable, REPO / "examples/books/tokenise.py", tmp_path, tmp_path / "out", check=False)
    assert result.returncode == 1 and "give at least 5" in result.stderr


@pytest.mark.slow
def test_scaling(tmp_path, corpus):
    for split in ("train", "valid"):
        (tmp_path / f"{split}.txt").write_text((corpus.parent / f"{split}.txt").read_text())
    output = recipe("scaling/run.sh", tmp_path / "work", TEXT=tmp_path)
    content = json.loads((tmp_path / "work/results/scaling.json").read_text())
    results, whole = content["results"], content["results"]["rows"][-1]
    assert [row["fraction"] for row in results["rows"]] == [0.25, 1.0]
    assert whole["entries"] == sum(len(line.split()) + 1 for line in (tmp_path / "train.txt").open())
    assert whole["mixture"] < results["little"]  # the datastore helps the LM that has seen little
    assert results["training"]["little"]["epoch"] > results["training"]["large"]["epoch"] >= 1
    assert results["training"]["little"]["seed"] == 1
    assert all(str(tmp_path) not in command for command in content["commands"])
    assert "14.61" in output and f"{whole['mixture']:.2f}" in output
    assert (tmp_path / "work/results/scaling.svg").exists()


def test_small_books(tmp_path):
    """What SMALL=1 makes where no books are given: books that share no paragraph, and text of another domain."""
    run(sys.executable, REPO / "examples/books/small.py", tmp_path)
    books = [set(path.read_text().split("\n\n")) for path in (tmp_path / "books").glob("*.txt")]
    assert len(books) == 8 and min(map(len, books)) > 20
    assert sum(map(len, books)) == len(set.union(*books))
    assert len((tmp_path / "other/train.txt").read_text().splitlines()) > 1000


def test_flags_of_full_size():
    """fairseq knows the flags of every size, and takes the context from --tokens-per-sample."""
    from fairseq import options

    task = ["--task", "language_modeling"]

    for size in ("toy", "tiny", "small", "paper"):
        script = f"logs=/tmp/none; mkdir() {{ :; }}; source examples/lib.sh; training_flags {size}"
        flags = {}
        for name in ("training", "context"):
            printed = run("bash", "-c", f'{script}; printf "%s\\n" "${{{name}[@]}}"').stdout
            flags[name] = printed.splitlines()
        train = options.parse_args_and_arch(options.get_training_parser(), ["data", *task, *flags["training"]])
        score = options.parse_args_and_arch(options.get_eval_lm_parser(), ["data", *task, *flags["context"]])
        assert score.tokens_per_sample == train.tokens_per_sample == 2 * score.context_window


@pytest.mark.slow
def test_pages_come_from_json(tmp_path):
    """One command writes docs/results.md and the pages beside it again from the JSON files, as they are."""
    for folder in ("docs", "benchmarks", "examples", "fairseq_knnlm"):
        shutil.copytree(REPO / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    written = [tmp_path / "docs/results.md", *(tmp_path / "docs/results").glob("*.md")]
    pages = {path: path.read_text() for path in written if not path.name.endswith(".notes.md")}
    for path in pages:
        path.unlink()
    run("env", "-C", tmp_path, f"PYTHONPATH={tmp_path}", sys.executable, "-m", "benchmarks.results", "--report")
    for path, text in pages.items():
        assert path.read_text() == text, path
