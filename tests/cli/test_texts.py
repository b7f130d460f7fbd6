"""knnlm score and knnlm inspect on raw text."""

import io
import json
import re
import socket
import sys

import numpy as np
import pytest
from commands import error_of, eval_lm_here, preprocess_here, run

from fairseq_knnlm import KNNLM, cli


@pytest.fixture(scope="module")
def model_flags(corpus, adaptive_model, dump):
    return ["--path", adaptive_model, "--data", corpus]


@pytest.fixture(scope="module")
def knn(dump):
    return ["--knn-lambda", "0.4", "--knn-temperature", "5", "--knn-k", "64"], dump("train")


def knnlm(capsys, *arguments) -> str:
    assert cli.main(list(map(str, arguments))) == 0
    return capsys.readouterr().out


def test_score_is_that_of_eval_lm(capsys, caplog, corpus, adaptive_model, model_flags, knn, tmp_path):
    flags, store = knn
    lines = ["w1 w2 w3 w4", "w9", "w5 nosuchword w7 w8 w9"]
    (tmp_path / "text.txt").write_text("\n".join([lines[0], "", *lines[1:]]) + "\n")
    out = knnlm(capsys, "score", *model_flags, "--knn-datastore", store, *flags, "--json", tmp_path / "text.txt")
    *rows, total = map(json.loads, out.splitlines())
    assert [row["line"] for row in rows] == [1, 3, 4] and [row["unknown"] for row in rows] == [0, 0, 1]
    (tmp_path / "dense.txt").write_text("\n".join(lines) + "\n")
    data = preprocess_here(tmp_path / "bin", corpus / "dict.txt", test=tmp_path / "dense.txt")
    common = ["--gen-subset", "test", "--sample-break-mode", "eos", "--context-window", "0"]
    base = float(eval_lm_here(data, adaptive_model, *common)["loss"])
    mixture = float(eval_lm_here(data, adaptive_model, *common, "--knn-datastore", store, *flags)["loss"])
    assert total["total"]["lm"]["perplexity"] == pytest.approx(2**base, rel=1e-4)
    assert total["total"]["mixture"]["perplexity"] == pytest.approx(2**mixture, rel=1e-4)
    assert sum(row["tokens"] for row in rows) == total["total"]["tokens"] == 13


def test_score_table_and_standard_input(capsys, monkeypatch, model_flags):
    """A process of its own, once: the table has a header, the two lines and the total."""
    text = "w1 w2\nw3 w4 w5\n"
    table = run("knnlm", "score", *model_flags, input=text).stdout
    assert len(table.splitlines()) == 4 and "kNN-LM" not in table
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert knnlm(capsys, "score", *model_flags) == table
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert "no text" in error_of(capsys, "score", *model_flags)


def test_long_lines_are_scored_in_blocks(capsys, model_flags, corpus, adaptive_model, tmp_path):
    """The model has 64 positions; every token is scored, the first 63 as in a short line."""
    words = [f"w{number % 40}" for number in range(150)]
    (tmp_path / "long.txt").write_text(" ".join(words) + "\n")
    row = json.loads(knnlm(capsys, "score", *model_flags, "--json", tmp_path / "long.txt").splitlines()[0])
    lm = KNNLM.from_pretrained(adaptive_model.parent, adaptive_model.name, corpus)
    long, short = (lm.score(" ".join(some)).lm_log_probs for some in (words, words[:63]))
    assert row["tokens"] == len(long) == 151 and row["lm"]["log_prob"] == pytest.approx(sum(long), abs=1e-3)
    np.testing.assert_allclose(long[:63], short[:63], atol=1e-5)


def test_moses(capsys, model_flags, tmp_path):
    (tmp_path / "raw.txt").write_text("w1, w2.\n")
    out = knnlm(capsys, "score", *model_flags, "--tokenizer", "moses", "--json", tmp_path / "raw.txt")
    row = json.loads(out.splitlines()[0])
    assert row["tokens"] == 5 and row["unknown"] == 2


def test_bad_score(capsys, model_flags, corpus, tmp_path, plain_model, dump):
    assert "cannot be read" in error_of(capsys, "score", *model_flags, tmp_path / "nothing.txt")
    missing = ["--path", tmp_path / "x.pt", "--data", corpus]
    assert "no checkpoint" in error_of(capsys, "score", *missing, corpus / "dict.txt")
    assert "dict.txt" in error_of(capsys, "score", *model_flags[:2], "--data", tmp_path, corpus / "dict.txt")
    other = ["--path", plain_model, "--data", corpus, "--knn-datastore", dump("train")]
    assert "another checkpoint" in error_of(capsys, "score", *other, corpus / "dict.txt")


def page_data(path) -> dict:
    return json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', path.read_text(), re.DOTALL)[1])


def test_inspect_a_text(capsys, model_flags, knn, tmp_path):
    flags, store = knn
    page = tmp_path / "page.html"
    knnlm(capsys, "inspect", *model_flags, "--datastore", store, *flags, "--text", "w1 w2 w3\nw4 w5", "-o", page)
    data = page_data(page)
    assert [data["words"][token["w"]] for token in data["tokens"]] == ["w1", "w2", "w3", "\u23ce", "w4", "w5", "\u23ce"]
    (tmp_path / "text.txt").write_text("w1 w2 w3\nw4 w5\n")
    out = knnlm(capsys, "score", *model_flags, "--knn-datastore", store, *flags, "--json", tmp_path / "text.txt")
    total = json.loads(out.splitlines()[-1])["total"]
    assert data["about"]["mix"] == pytest.approx(total["mixture"]["perplexity"], rel=1e-4)
    for token in data["tokens"]:
        assert token["mix"] == pytest.approx(0.6 * token["lm"] + 0.4 * token["knn"], rel=2e-3)
        assert len(token["near"]) == 8 and len(token["top"]) == 5
        assert sum(near["share"] for near in token["near"]) <= 1.001


def test_neighbours_stand_where_the_page_says(capsys, model_flags, knn, tmp_path):
    from fairseq_knnlm.datastore import Datastore

    flags, store = knn
    page = tmp_path / "page.html"
    knnlm(capsys, "inspect", *model_flags, "--datastore", store, *flags, "--split", "valid", "--from", "100",
          "--tokens", "20", "-o", page)  # fmt: skip
    data, text = page_data(page), Datastore(store).values
    assert len(data["tokens"]) == 20
    dictionary = {line.split()[0]: number + 4 for number, line in enumerate((model_flags[3] / "dict.txt").open())}
    number = lambda w: 2 if data["words"][w] == "\u23ce" else dictionary.get(data["words"][w], 3)  # noqa: E731
    for token in data["tokens"]:
        for near in token["near"]:
            assert [number(w) for w in near["c"]] == text[max(0, near["entry"] - 16) : near["entry"]].tolist()
            assert number(near["w"]) == text[near["entry"]]


def test_a_subsample_reads_the_corpus(capsys, model_flags, knn, tmp_path, corpus):
    from fairseq_knnlm.datastore import Datastore, Manifest

    flags, store = knn
    knnlm(capsys, "subsample", store, "--fraction", "0.5", "-o", tmp_path / "half")
    arguments = ["inspect", *model_flags, "--datastore", tmp_path / "half", *flags, "--text", "w1 w2 w3"]
    knnlm(capsys, *arguments, "-o", tmp_path / "page.html")
    positions, text = np.load(tmp_path / "half/positions.npy"), Datastore(store).values
    data = page_data(tmp_path / "page.html")
    dictionary = {line.split()[0]: number + 4 for number, line in enumerate((corpus / "dict.txt").open())}
    for near in data["tokens"][1]["near"]:
        words = [dictionary.get(data["words"][w], 2) for w in near["c"]]
        stop = positions[near["entry"]]
        assert words == text[max(0, stop - 16) : stop].tolist()
    manifest = Manifest.load(tmp_path / "half")
    manifest.source["data"] = str(tmp_path / "moved")
    manifest.save(tmp_path / "half")
    assert "put the binarised data back" in error_of(capsys, *arguments, "-o", tmp_path / "page.html")


def test_bad_inspect(capsys, model_flags, knn, tmp_path):
    _, store = knn
    base = ["inspect", *model_flags, "--datastore", store]
    assert "--text is empty" in error_of(capsys, *base, "--text", "  ")
    assert "no split" in error_of(capsys, *base, "--split", "nothing")
    assert "behind its end" in error_of(capsys, *base, "--split", "valid", "--from", "1000000")
    assert "cannot be written" in error_of(capsys, *base, "--text", "w1", "-o", tmp_path / "no/such/page.html")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "choose another with --port" in error_of(capsys, *base, "--serve", "--port", taken.getsockname()[1])
