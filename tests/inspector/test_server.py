"""knnlm inspect --serve without a model: bad clients, many clients, infinite numbers, signals."""

import json
import logging
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "chaos"))

from pages import needs_node, run_node
from server import Answer, Client, parse, run_server_chaos

from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.inspector import connections, http
from fairseq_knnlm.inspector.page import build_page, embed, script
from fairseq_knnlm.inspector.server import AS_STARTED, Settings, make_server

LOOPBACK = "127.0.0.1"


class StandIn:
    """Behaves as the text says; nothing of it needs a model."""

    def score(self, text: str, settings: Settings = AS_STARTED) -> dict:
        if not text.strip():
            raise KnnlmError("there is no text; type some words")
        if text == "bug":
            raise ZeroDivisionError("a bug\nin two lines")
        if text == "odd":
            return {"data": object()}
        if text.startswith("wait "):
            time.sleep(float(text.split()[1]))
        chosen = [settings.weights, settings.temperatures]
        return {"data": {"about": {"lm": math.inf, "mix": 5.0}, "text": text, "settings": chosen}}

    def continue_(self, text: str, settings: Settings = AS_STARTED) -> dict:
        return {"text": f"{text} more", "note": "", "data": {}}


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(http, "REQUEST_SECONDS", 1.0)
    server = make_server(StandIn(), LOOPBACK, 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield Client(*server.server_address)
    server.shutdown()
    server.server_close()
    thread.join()


def ask(client: Client, data: bytes) -> tuple[int, dict]:
    answer = client.exchange("a test", data)
    return answer.status, json.loads(answer.body)


def receive(connection: socket.socket) -> Answer:
    received = b""
    while part := connection.recv(65536):
        received += part
    return parse("a test", received)


def test_chaos(client, capfd, caplog):
    counts = run_server_chaos(client.host, client.port, parallel=100, deadline=1.0)
    assert counts["requests"] >= 100 and counts["slow"] >= 40 and counts["hostile"] >= 100
    assert "Traceback" not in capfd.readouterr().err
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


def test_answers(client):
    assert b"<!DOCTYPE html>" in client.exchange("the page", client.request("GET / HTTP/1.1")).body
    assert client.exchange("the icon", client.request("GET /favicon.ico HTTP/1.1")).status == 204
    status, answer = ask(client, client.post({"text": "w1 </script> \u4e16\u754c \U0001f600"}))
    assert status == 200 and answer["data"]["text"] == "w1 </script> \u4e16\u754c \U0001f600"
    content = b'{"text": "w1"}'
    assert ask(client, client.request("POST /continue HTTP/1.0", content))[1]["text"] == "w1 more"
    assert ask(client, client.request(body=content, Content_Type="Application/JSON; charset=utf-8"))[0] == 200
    assert ask(client, client.request(body=content, Host="LOCALHOST"))[0] == 200
    assert ask(client, client.request(body=content, length=f"00{len(content)}"))[0] == 200


def test_settings_are_numbers_or_left_out(client):
    answer = ask(client, client.post({"text": "w1", "lambda": [0.2, 0], "temperature": [3, 1e-3]}))[1]
    assert answer["data"]["settings"] == [[0.2, 0.0], [3.0, 0.001]]
    assert ask(client, client.post({"text": "w1", "lambda": None}))[1]["data"]["settings"] == [None, None]
    for wrong in (0.2, "0.2", ["0.2"], [True], [None], [[0.2]], {"0": 0.2}, [10**400]):
        status, answer = ask(client, client.post({"text": "w1", "lambda": wrong}))
        assert status == 400 and 'send "lambda" as a list of numbers' in answer["error"]
    for wrong in (b"[NaN]", b"[Infinity]"):
        status, answer = ask(client, client.request(body=b'{"text": "w1", "temperature": %b}' % wrong))
        assert status == 400 and "temperature" in answer["error"]


def test_a_request_leaves_no_line_in_the_log(client, caplog):
    caplog.set_level(logging.DEBUG)
    client.exchange("the page", client.request("GET / HTTP/1.1"))
    ask(client, client.post({"text": "w1"}))
    assert ask(client, client.request("GET /nothing HTTP/1.1"))[0] == 404
    assert not caplog.records


def test_examples_stand_in_the_page_as_text():
    hostile = "</script><script>alert(1)</script>"
    page = build_page(None, live=True, examples=["w1 w2", hostile])
    assert "alert(1)</script>" not in page and json.dumps("w1 w2") in page
    # what looks like a mark of the page in a text is text, too
    assert "@@DATA@@ @@SCRIPT@@" in build_page({"words": ["@@DATA@@ @@SCRIPT@@"]})


def test_errors_say_what_to_do(client):
    assert ask(client, client.post({"text": " "})) == (422, {"error": "there is no text; type some words"})
    answer = client.exchange("a method", client.request("PUT /score HTTP/1.1"))
    assert answer.status == 405 and answer.headers["allow"] == "POST"
    assert answer.headers["content-type"] == "application/json"
    head = client.exchange("a head", client.request("HEAD / HTTP/1.1"))
    assert (head.status, head.body) == (405, b"")
    assert ask(client, b"GET / HTTP/3.0\r\n\r\n") == (505, {"error": "use HTTP/1.0 or HTTP/1.1"})


@pytest.mark.parametrize("text", ["bug", "odd"])
def test_a_bug_is_one_sentence_and_one_record(client, caplog, text):
    caplog.set_level(logging.INFO)
    status, answer = ask(client, client.post({"text": text}))
    assert status == 500 and "could not be processed" in answer["error"] and "\n" not in answer["error"]
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.ERROR
    assert ask(client, client.post({"text": "w1"}))[0] == 200


def test_a_slow_request_is_told_why(client):
    with client.connect() as connection:
        connection.sendall(b"POST /score HTTP/1.1\r\nHost: local")
        started = time.monotonic()
        answer = receive(connection)
        assert answer.status == 408 and 0.5 < time.monotonic() - started < 4


def test_too_many_connections(client, monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    idle = [client.connect() for _ in range(3)]
    started = time.monotonic()
    with client.connect() as connection:
        connection.sendall(client.post({"text": "w1"}))
        answer = receive(connection)
    assert answer.status == 503 and "try again" in json.loads(answer.body)["error"]
    assert time.monotonic() - started < 0.9  # and not only when one of the others was closed
    for connection in idle:
        connection.close()
    while ask(client, client.post({"text": "w1"}))[0] != 200:
        assert time.monotonic() - started < 5


def test_bad_addresses():
    with pytest.raises(KnnlmError, match="choose another with --port"):
        make_server(StandIn(), LOOPBACK, 99_999)
    with pytest.raises(KnnlmError, match="cannot be used"):
        make_server(StandIn(), "203.0.113.1", 0)  # an address for documents, which no machine has


# --- the end --------------------------------------------------------------------------------------------------------


def serve(pipe, ending_seconds: float) -> None:
    connections.ENDING_SECONDS = ending_seconds
    server = make_server(StandIn(), LOOPBACK, 0)
    server.catch_signals()
    pipe.send(server.server_address)
    server.run()


@pytest.fixture
def start():
    """start(ending_seconds): a server in a process of its own; a fork, because importing fairseq takes seconds."""
    context, processes = multiprocessing.get_context("fork"), []

    def start(ending_seconds: float) -> tuple[multiprocessing.Process, Client]:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(theirs, ending_seconds)))
        processes[-1].start()
        return processes[-1], Client(*ours.recv())

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_while_requests_are_under_way(start, capfd, number):
    process, client = start(ending_seconds=5.0)
    half, running, waiting = (client.connect() for _ in range(3))
    half.sendall(client.post({"text": "w1"})[:-3])
    running.sendall(client.post({"text": "wait 0.6"}))
    time.sleep(0.2)
    waiting.sendall(client.post({"text": "w1"}))
    time.sleep(0.1)
    os.kill(process.pid, number)
    os.kill(process.pid, number)
    assert receive(running).status == 200
    assert receive(waiting).status == 503
    assert receive(half).status == 400
    process.join(5)
    assert process.exitcode == 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_signal_ends_it_while_a_request_takes_too_long(start, capfd):
    process, client = start(ending_seconds=0.2)
    with client.connect() as connection:
        connection.sendall(client.post({"text": "wait 60"}))
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGTERM)
        process.join(4)
    assert process.exitcode == 0
    assert "Traceback" not in capfd.readouterr().err


# --- numbers that JSON does not have --------------------------------------------------------------------------------


def test_infinite_numbers_are_strings(client):
    data = {"about": {"lm": math.inf, "mix": -math.inf}, "words": ["inf"], "p": [math.nan, 0.5, 1]}
    expected = {"about": {"lm": "inf", "mix": "-inf"}, "words": ["inf"], "p": ["nan", 0.5, 1]}
    assert json.loads(embed(data), parse_constant=pytest.fail) == expected
    assert "Infinity}" not in build_page(data)
    assert ask(client, client.post({"text": "w1"}))[1]["data"]["about"]["lm"] == "inf"


def test_perplexity_of_an_impossible_text():
    import torch

    from fairseq_knnlm.inspector.collect import _perplexity
    from fairseq_knnlm.mixture.interpolation import LOG_ZERO

    assert _perplexity(torch.tensor([-1.0, LOG_ZERO])) == math.inf
    assert _perplexity(torch.tensor([-math.inf])) == math.inf
    assert _perplexity(torch.tensor([0.0])) == 1.0


# A document just large enough for page.js, which prints what it was given to show.
DOCUMENT = """
const nodes = {}, listeners = [];
const make = (name) => ({
  name, children: [], attributes: {}, dataset: {},
  set textContent(text) { this.children = text === "" ? [] : [text]; },
  get textContent() { return this.children.map((c) => c.textContent ?? String(c)).join("|"); },
  append(...parts) { this.children.push(...parts); },
  setAttribute(key, value) { this.attributes[key] = String(value); },
  removeAttribute() {}, querySelector() { return null; }, querySelectorAll() { return []; },
  addEventListener(kind, act) { if (this.dataset.order) listeners.push(act); },
});
const buttons = ["helped", "hurt"].map((order) => Object.assign(make("button"), { dataset: { order } }));
const document = {
  createElement: make, createElementNS: (_, name) => make(name), querySelector: () => null,
  getElementById: (id) => nodes[id] ??= make(id),
  querySelectorAll: (selector) => selector === "[data-order]" ? buttons : [],
};
document.getElementById("data").dataset.live = "false";
document.getElementById("data").textContent = DATA;
"""
REPORT = """
const all = (node) => [node, ...(node.children ?? []).flatMap(all)];
const shapes = all(nodes.plots).flatMap((node) => Object.values(node.attributes ?? {}));
const orders = listeners.map((act) => { act(); return nodes.tokens.textContent; });
const [summary, detail] = [nodes.summary.textContent, nodes["detail-body"].textContent];
console.log(JSON.stringify({ summary, detail, shapes, orders }));
"""


@needs_node
def test_page_shows_infinite_numbers():
    nan = math.nan
    pairs = [(0.5, 0.25), (0.0, 0.1), (0.0, 0.0), (0.1, 0.0), (0.3, 0.3), (1e-40, 0.2), (nan, 0.1), (0.1, nan)]
    near = [{"c": [0], "w": 1, "d": math.inf, "share": 0.5, "entry": 1, "store": 0}]
    data = {
        "about": {
            "lm": math.inf, "mix": 12.345, "helped": 0.5,
            "stores": [{"name": "s", "entries": 9, "lambda": 0.25, "temperature": 1, "k": 8, "metric": "l2"}],
        },
        "words": ["inf", *(f"w{number}" for number in range(1, 9))],
        "tokens": [
            {"w": number, "lm": lm, "knn": 0.0, "mix": mix, "top": [[0, 0.0], [1, 0.4]], "near": near}
            for number, (lm, mix) in enumerate(pairs)
        ],
    }  # fmt: skip
    report = run_node(DOCUMENT.replace("DATA", json.dumps(embed(data))) + script() + REPORT)
    assert "perplexity, LM|inf|" in report["summary"] and "perplexity, kNN-LM|12.35" in report["summary"]
    assert "gain, nats|inf" in report["detail"] and "|inf|" in report["detail"]  # the best token, and a distance
    assert not [value for value in report["shapes"] if "NaN" in value or "Infinity" in value]
    helped, hurt = report["orders"]
    assert "w1|+inf" in helped.split("||")[0] and "w3|-inf" in hurt
    assert helped.index("w1|+inf") < helped.index("w5|+90") < helped.index("w3|-inf")
    assert hurt.index("w3|-inf") < hurt.index("w5|+90") < hurt.index("w1|+inf")
