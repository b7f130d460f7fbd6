"""knnlm score and knnlm inspect on raw text."""

import json
import re
import socket
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest
from conftest import fails_with, preprocess, run

from fairseq_knnlm import cli
from fairseq_knnlm.inspector.page import build_page, embed

HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def model_flags(corpus, adaptive_model, dump):
    return ["--path", adaptive_model, "--data", corpus]


@pytest.fixture(scope="module")
def knn(dump):
    return ["--knn-lambda", "0.4", "--knn-temperature", "5", "--knn-k", "64"], dump("train")


def knnlm(capsys, *arguments) -> str:
    assert cli.main(list(map(str, arguments))) == 0
    return capsys.readouterr().out


def error_of(capsys, *arguments) -> str:
    assert cli.main(list(map(str, arguments))) == 1
    return capsys.readouterr().err


# --- score ----------------------------------------------------------------------------------------------------------


def test_score_is_that_of_eval_lm(capsys, caplog, corpus, adaptive_model, model_flags, knn, tmp_path):
    from conftest import eval_lm_here

    flags, store = knn
    lines = ["w1 w2 w3 w4", "w9", "w5 nosuchword w7 w8 w9"]
    (tmp_path / "text.txt").write_text("\n".join([lines[0], "", *lines[1:]]) + "\n")
    out = knnlm(capsys, "score", *model_flags, "--knn-datastore", store, *flags, "--json", tmp_path / "text.txt")
    *rows, total = map(json.loads, out.splitlines())
    assert [row["line"] for row in rows] == [1, 3, 4] and [row["unknown"] for row in rows] == [0, 0, 1]
    (tmp_path / "dense.txt").write_text("\n".join(lines) + "\n")
    data = preprocess(tmp_path / "bin", corpus / "dict.txt", test=tmp_path / "dense.txt")
    common = ["--gen-subset", "test", "--sample-break-mode", "eos", "--context-window", "0"]
    base = float(eval_lm_here(data, adaptive_model, *common)["loss"])
    mixture = float(eval_lm_here(data, adaptive_model, *common, "--knn-datastore", store, *flags)["loss"])
    assert total["total"]["lm"]["perplexity"] == pytest.approx(2**base, rel=1e-4)
    assert total["total"]["mixture"]["perplexity"] == pytest.approx(2**mixture, rel=1e-4)
    assert sum(row["tokens"] for row in rows) == total["total"]["tokens"] == 13


def test_score_table_and_standard_input(adaptive_model, corpus):
    result = run("knnlm", "score", "--path", adaptive_model, "--data", corpus, input="w1 w2\nw3 w4 w5\n")
    assert len(result.stdout.splitlines()) == 4 and "kNN-LM" not in result.stdout
    fails_with(run("knnlm", "score", "--path", adaptive_model, "--data", corpus, input="\n", check=False), "no text")


def test_long_lines_are_scored_in_blocks(capsys, model_flags, tmp_path):
    """The model has 64 positions; every token is scored, and the first 64 as in a short line."""
    words = [f"w{number % 40}" for number in range(150)]
    (tmp_path / "long.txt").write_text(" ".join(words) + "\n")
    row = json.loads(knnlm(capsys, "score", *model_flags, "--json", tmp_path / "long.txt").splitlines()[0])
    assert row["tokens"] == 151 and np.isfinite(row["lm"]["log_prob"])


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


# --- inspect --------------------------------------------------------------------------------------------------------


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


def test_text_stays_text():
    assert "<" not in embed({"word": HOSTILE}) and json.loads(embed({"word": HOSTILE}))["word"] == HOSTILE
    page = build_page({"word": HOSTILE})
    assert "alert(1)</script>" not in page
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)  # nothing is fetched


@pytest.fixture(scope="module")
def server(model_flags, knn):
    from fairseq_knnlm.cli import _parser
    from fairseq_knnlm.inspector.collect import Inspector
    from fairseq_knnlm.inspector.server import LiveInspector, make_server
    from fairseq_knnlm.text_commands import load

    flags, store = knn
    arguments = list(map(str, ["inspect", *model_flags, "--datastore", store, *flags, "--serve"]))
    inspector = Inspector.of(load(_parser().parse_args(arguments)))
    server = make_server(LiveInspector(inspector), "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def ask(url: str, body: bytes | None = None, **headers) -> tuple[int, dict | str]:
    request = urllib.request.Request(url, body, headers)
    try:
        with urllib.request.urlopen(request) as response:
            status, content = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, content = error.code, error.read().decode()
    return status, json.loads(content) if content.startswith("{") else content


JSON = {"Content-Type": "application/json"}


def test_live_page(server):
    status, page = ask(server + "/")
    assert status == 200 and 'data-live="true"' in page
    status, answer = ask(server + "/score", json.dumps({"text": f"w1 w2\n{HOSTILE}"}).encode(), **JSON)
    assert status == 200 and len(answer["data"]["tokens"]) == 5
    status, answer = ask(server + "/continue", json.dumps({"text": "w1 w2"}).encode(), **JSON)
    assert status == 200 and answer["text"].startswith("w1 w2 ")


def test_live_limits(server):
    assert ask(server + "/etc/passwd")[0] == 404
    assert ask(server + "/../../etc/passwd")[0] == 404
    assert ask(server + "/score", b'{"text": "w1"}', **{"Content-Type": "text/plain"})[0] == 415
    assert ask(server + "/score", b"{}", **JSON)[0] == 400
    assert ask(server + "/score", b'{"text": 5}', **JSON)[0] == 400
    assert ask(server + "/score", b"x" * 100_000, **JSON)[0] == 413
    assert ask(server + "/", Host="evil.example")[0] == 403
    assert "no text" in ask(server + "/score", b'{"text": " "}', **JSON)[1]["error"]
    many = json.dumps({"text": "w1 " * 2500}).encode()
    assert "at most 2,000" in ask(server + "/score", many, **JSON)[1]["error"]
