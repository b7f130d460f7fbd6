"""The page with a real model: hostile text, and the live page with its limits."""

import json
import re
import threading
import urllib.error
import urllib.request

import pytest

from fairseq_knnlm.inspector.page import build_page, embed

HOSTILE = "</script><script>alert(1)</script>"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def model_flags(corpus, adaptive_model, dump):
    return ["--path", adaptive_model, "--data", corpus]


@pytest.fixture(scope="module")
def knn(dump):
    return ["--knn-lambda", "0.4", "--knn-temperature", "5", "--knn-k", "64"], dump("train")


@pytest.fixture(scope="module")
def server(model_flags, knn):
    from fairseq_knnlm.cli.main import _parser
    from fairseq_knnlm.cli.texts import load
    from fairseq_knnlm.inspector.collect import Inspector
    from fairseq_knnlm.inspector.server import LiveInspector, make_server

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


def test_text_stays_text():
    assert "<" not in embed({"word": HOSTILE}) and json.loads(embed({"word": HOSTILE}))["word"] == HOSTILE
    page = build_page({"word": HOSTILE})
    assert "alert(1)</script>" not in page
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)  # nothing is fetched


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
