"""Clients from hell for ``knnlm inspect --serve``: slow ones, many at once, and ones that send nonsense.

``run_server_chaos`` talks to a running server over plain sockets, because every HTTP library would refuse to send most
of this.
"""

import json
import resource
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

ANSWER_SECONDS = 5.0  # in which a single request must be answered, whatever else goes on
FLOOD_SECONDS = 300.0  # in which all parallel requests must be answered
CLOSING_SECONDS = 5.0  # after its deadline, in which a slow connection must be closed
COPIES = 5  # of each kind of slow sender
DESERTERS = 50  # clients that go away before their answer
TEXT = {"text": "w1 w2 w3"}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float


@dataclass
class Client:
    host: str
    port: int

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=ANSWER_SECONDS)

    def request(
        self, start: str = "POST /score HTTP/1.1", body: bytes = b"", length: object = None, **headers: object
    ) -> bytes:
        """A good request but for what is given; a header that is None is left out, one that is a list is repeated."""
        fields = {
            "Host": f"{self.host}:{self.port}",
            "Content-Type": "application/json",
            "Content-Length": len(body) if length is None else length,
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        lines = [start]
        for name, values in fields.items():
            values = values if isinstance(values, list) else [values]
            lines += [f"{name}: {value}" for value in values if value is not None]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body

    def post(self, content: object) -> bytes:
        return self.request(body=json.dumps(content).encode())

    def exchange(self, what: str, data: bytes) -> Answer:
        """Send bytes, and read the answer until the server closes."""
        started, received = time.monotonic(), b""
        with self.connect() as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            except ConnectionError:
                pass  # the server may close as soon as it has seen enough; its answer is here all the same
            try:
                while part := connection.recv(65536):
                    received += part
            except TimeoutError:
                raise AssertionError(f"{what}: not answered and closed in {ANSWER_SECONDS:.0f} s") from None
            except ConnectionError:
                pass
        return parse(what, received, time.monotonic() - started)


def parse(what: str, received: bytes, seconds: float = 0.0) -> Answer:
    head, separator, body = received.partition(b"\r\n\r\n")
    assert separator and head.startswith(b"HTTP/"), f"{what}: no HTTP answer but {received[:200]!r}"
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Answer(int(first.split()[1]), headers, body, seconds)


def check_score(what: str, answer: Answer) -> None:
    """The answer is a scored text."""
    assert answer.status == 200, f"{what}: status {answer.status}, {answer.body[:200]!r}"
    assert len(answer.body) == int(answer.headers["content-length"]), f"{what}: only a part of the answer arrived"
    assert "data" in read_json(what, answer.body), f"{what}: an answer without data"


def check_error(what: str, answer: Answer, statuses: tuple[int, ...], has_body: bool = True) -> None:
    """The answer is one JSON sentence with one of these statuses."""
    assert answer.status in statuses, f"{what}: status {answer.status} and not {statuses}, {answer.body[:200]!r}"
    assert answer.seconds < ANSWER_SECONDS, f"{what}: answered after {answer.seconds:.1f} s"
    if has_body:
        content = read_json(what, answer.body)
        assert set(content) == {"error"} and content["error"], f"{what}: {content} is no clear error"
        assert "\n" not in content["error"] and "Traceback" not in content["error"], f"{what}: {content['error']}"


def read_json(what: str, body: bytes) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{what}: {name} in an answer, which browsers cannot read")

    try:
        return json.loads(body, parse_constant=refuse)
    except ValueError as error:
        raise AssertionError(f"{what}: no JSON but {body[:200]!r}") from error


# --- slow senders ---------------------------------------------------------------------------------------------------


def slow_kinds(client: Client) -> dict[str, tuple[bytes, Callable[[], Iterator[bytes]]]]:
    """What each kind sends at once, and what it then sends piece by piece."""
    whole = client.post(TEXT)
    head, body = whole.split(b"\r\n\r\n")

    def nothing() -> Iterator[bytes]:
        yield from ()

    def endless_line() -> Iterator[bytes]:
        while True:
            yield b"x"

    return {
        "a byte at a time": (b"", lambda: iter(whole[place : place + 1] for place in range(len(whole)))),
        "nothing at all": (b"", nothing),
        "half a request line": (b"POST /sc", nothing),
        "an endless request line": (b"GET /", endless_line),
        "half the headers": (head[: len(head) // 2], nothing),
        "headers without an end": (head + b"\r\n", lambda: iter(f"X-{n}: y\r\n".encode() for n in range(90))),
        "an endless header": (head + b"\r\nX: ", endless_line),
        "half a body": (head + b"\r\n\r\n" + body[:3], nothing),
        "a body, a byte at a time": (head.replace(b"Length: ", b"Length: 9") + b"\r\n\r\n", endless_line),
    }


class SlowSenders:
    """All of them in one thread, which notes when the server closes each."""

    def __init__(self, client: Client, deadline: float):
        self._interval = min(1.0, deadline / 10)
        self.started = time.monotonic()
        self.closed: dict[socket.socket, float] = {}
        self._open: dict[socket.socket, tuple[str, Iterator[bytes]]] = {}
        for kind, (first, rest) in slow_kinds(client).items():
            for _ in range(COPIES):
                connection = client.connect()
                connection.sendall(first)
                connection.setblocking(False)
                self._open[connection] = kind, rest()
        self.count = len(self._open)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._open and not self._is_over.wait(self._interval):
            for connection, (_, rest) in list(self._open.items()):
                if self._is_closed(connection, next(rest, b"")):
                    self.closed[connection] = time.monotonic() - self.started
                    del self._open[connection]
                    connection.close()

    @staticmethod
    def _is_closed(connection: socket.socket, piece: bytes) -> bool:
        try:
            while connection.recv(65536):  # perhaps an answer that says why
                pass
            return True
        except BlockingIOError:
            pass
        except ConnectionError:
            return True
        with suppress(BlockingIOError, ConnectionError):  # the next look will see the end
            connection.send(piece)
        return False

    def check_patience(self, deadline: float) -> None:
        """None was closed long before the deadline."""
        early = [seconds for seconds in list(self.closed.values()) if seconds < deadline / 2]
        assert not early, f"slow senders: {len(early)} were closed after {min(early):.1f} s of {deadline} s"

    def check_closed(self, deadline: float) -> None:
        """All were closed soon after the deadline."""
        self._thread.join(max(0.0, self.started + deadline + CLOSING_SECONDS - time.monotonic()))
        left = sorted({kind for kind, _ in list(self._open.values())})
        self._is_over.set()
        self._thread.join()
        for connection in self._open:
            connection.close()
        assert not left, f"slow senders: still connected {CLOSING_SECONDS:.0f} s after the deadline: {', '.join(left)}"


# --- many at once ---------------------------------------------------------------------------------------------------


def flood(client: Client, count: int) -> int:
    """Send good requests at once, and check that each is answered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(count + 500, hard)) if hard > 0 else soft, hard))
    request, received = client.post(TEXT), {}
    deadline = time.monotonic() + FLOOD_SECONDS
    with selectors.DefaultSelector() as selector:
        for _ in range(count):
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex((client.host, client.port))
            selector.register(connection, selectors.EVENT_WRITE)
            received[connection] = b""
        try:
            while selector.get_map():
                waiting = len(selector.get_map())
                assert time.monotonic() < deadline, f"flood: {waiting} of {count} not answered in {FLOOD_SECONDS:.0f} s"
                for key, events in selector.select(1.0):
                    _advance(selector, key.fileobj, events, request, received)
        finally:
            for connection in received:
                connection.close()
    for number, answer in enumerate(received.values()):
        check_score(f"request {number} of {count} at once", parse(f"request {number} of {count} at once", answer))
    return count


def _advance(
    selector: selectors.BaseSelector, connection: socket.socket, events: int, request: bytes, received: dict
) -> None:
    """Send the request when the connection is there, then collect what comes back."""
    try:
        if events & selectors.EVENT_WRITE:
            connection.sendall(request)  # fits into the empty buffer
            selector.modify(connection, selectors.EVENT_READ)
        elif part := connection.recv(65536):
            received[connection] += part
        else:
            selector.unregister(connection)
    except ConnectionError as error:
        raise AssertionError(f"flood: a connection failed ({error})") from error


def desert(client: Client, count: int) -> int:
    """Send good requests and go away without reading, half of them with a reset."""
    for number in range(count):
        with client.connect() as connection:
            connection.sendall(client.post(TEXT))
            if number % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return count


# --- hostile input --------------------------------------------------------------------------------------------------


def hostile_requests(client: Client) -> dict[str, tuple[bytes, tuple[int, ...]]]:
    """Bytes to send, and the statuses that fit."""
    request, good = client.request, json.dumps(TEXT).encode()

    def body(content: bytes) -> bytes:
        return request(body=content)

    lines = {
        "no HTTP": (b"hello\r\n\r\n", (400,)),
        "an empty line": (b"\r\n\r\n", (400,)),
        "zero bytes": (bytes(100) + b"\r\n\r\n", (400,)),
        "all bytes": (bytes(range(256)) + b"\r\n\r\n", (400,)),
        "a TLS greeting": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40) + b"\n", (400,)),
        "HTTP/0.9": (b"GET /\r\n\r\n", (400, 403)),
        "HTTP/0.9 in words": (request("GET / HTTP/0.9", Host="evil.example"), (403,)),
        "HTTP/2.0": (request("GET / HTTP/2.0"), (505,)),
        "HTTP/1.x": (request("GET / HTTP/1.x"), (400,)),
        "HTTP/9...9": (request(f"GET / HTTP/{'9' * 5000}.1"), (400,)),
        "four words": (request("GET / HTTP/1.1 please"), (400,)),
        "a method alone": (b"POST\r\n\r\n", (400,)),
        "a long request line": (request(f"GET /{'x' * 70_000} HTTP/1.1"), (414,)),
        "a line of a megabyte": (b"x" * 1_000_000, (414,)),
        "a long header": (request("GET / HTTP/1.1", X="y" * 70_000), (431,)),
        "500 headers": (request("GET / HTTP/1.1", X=list(range(500))), (431,)),
        "half the headers": (request()[:60], (400, 403, 411, 415)),
    }
    addresses = {
        "an unknown path": (request("GET /etc/passwd HTTP/1.1"), (404,)),
        "a path upwards": (request("GET /../../etc/passwd HTTP/1.1"), (404,)),
        "a path with zero bytes": (request("GET /\0 HTTP/1.1"), (404,)),
        "a whole address": (request("GET http://evil.example/ HTTP/1.1"), (404,)),
        "no Host": (request("GET / HTTP/1.1", Host=None), (400, 403)),
        "another Host": (request("GET / HTTP/1.1", Host="evil.example"), (403,)),
        "two Hosts": (request("GET / HTTP/1.1", Host=["localhost", "evil.example"]), (400, 403)),
        "a Host of other letters": (request("GET / HTTP/1.1", Host="\xff\xfe"), (403,)),
        **{
            f"{method} {path}": (request(f"{method} {path} HTTP/1.1", body=good), (405, 501))
            for method, path in (
                ("PUT", "/score"), ("DELETE", "/"), ("OPTIONS", "/score"), ("TRACE", "/"), ("BREW", "/continue"),
                ("GET", "/score"), ("POST", "/"), ("__class__", "/"), ("HEAD", "/"),
            )
        },
    }  # fmt: skip
    lengths = {
        "no length": (request(Content_Length=None), (411,)),
        "chunks": (request(Content_Length=None, Transfer_Encoding="chunked") + b"5\r\nhello\r\n0\r\n\r\n", (411, 501)),
        "chunks and a length": (request(body=good, Transfer_Encoding="chunked"), (400, 411, 501)),
        "a negative length": (request(length=-1), (400,)),
        "a length in words": (request(length="many"), (400,)),
        "an empty length": (request(length=""), (400, 411)),
        "a length of other digits": (request(length="\xb2"), (400,)),
        "a length with an underscore": (request(length="1_0"), (400,)),
        "two lengths": (request(body=good, length=[len(good), 3]), (400,)),
        "a huge length": (request(length=10**30), (413,)),
        "a length of 5,000 digits": (request(length="9" * 5000), (413,)),
        "a body of 65,537 bytes": (body(b"x" * 65_537), (413,)),
        "a body of 8 MB": (body(b"x" * 8_000_000), (413,)),
        "a short body": (request(body=good[:5], length=100), (400,)),
    }
    bodies = {
        "no type": (request(body=good, Content_Type=None), (415,)),
        "a type of text": (request(body=good, Content_Type="text/plain"), (415,)),
        "a form": (request(body=b"text=w1", Content_Type="application/x-www-form-urlencoded"), (415,)),
        "an empty body": (body(b""), (400,)),
        "no JSON": (body(b"w1 w2 w3"), (400,)),
        "half of the JSON": (body(good[:-3]), (400,)),
        "JSON and more": (body(good + b"x"), (400,)),
        "no UTF-8": (body(b'{"text": "\xff\xfe"}'), (400,)),
        "UTF-16": (body(good.decode().encode("utf-16")), (400,)),
        "a number of 5,000 digits": (body(b'{"text": ' + b"9" * 5000 + b"}"), (400,)),
        "deep lists": (body(b"[" * 60_000), (400,)),
        "deep objects": (body(b'{"text":' * 8_000), (400,)),
        "text in deep lists": (body(b'{"text":' + b"[" * 30_000 + b"]" * 30_000 + b"}"), (400,)),
        **{f"JSON {what}": (body(what.encode()), (400,)) for what in ("[]", "null", "5", '"text"', "{}", "NaN")},
        **{f"text {what}": (body(f'{{"text": {what}}}'.encode()), (400,)) for what in ("5", "null", '["w1"]', "{}")},
        "half a surrogate pair": (body(b'{"text": "\\ud800 w1"}'), (400,)),
        "a zero character": (body(b'{"text": "w1\\u0000w2"}'), (400,)),
        "a zero byte": (body(b'{"text": "w1\0w2"}'), (400,)),
        "a blank text": (body(b'{"text": " \\n "}'), (400, 422)),
    }
    return {**lines, **addresses, **lengths, **bodies}


# --- everything -----------------------------------------------------------------------------------------------------


def run_server_chaos(host: str, port: int, parallel: int = 1000, deadline: float = 20.0) -> dict[str, int]:
    """Trouble a server whose deadline for a whole request is given; how much of each, or an AssertionError."""
    client, counts = Client(host, port), {"requests": 0, "slow": 0, "hostile": 0}

    def check_normal(when: str) -> None:
        answer = client.exchange(f"a normal request {when}", client.post(TEXT))
        check_score(f"a normal request {when}", answer)
        assert answer.seconds < ANSWER_SECONDS, f"a normal request {when}: {answer.seconds:.1f} s"
        counts["requests"] += 1

    check_normal("at first")
    slow = SlowSenders(client, deadline)
    counts["slow"] = slow.count
    for _ in range(5):
        check_normal("while slow senders hang")
    slow.check_patience(deadline)
    for what, (data, statuses) in hostile_requests(client).items():
        check_error(what, client.exchange(what, data), statuses, has_body=not what.startswith("HEAD"))
        counts["hostile"] += 1
    check_normal("after hostile input")
    counts["requests"] += flood(client, parallel)
    counts["hostile"] += desert(client, DESERTERS)
    slow.check_closed(deadline)
    slow.check_patience(deadline)
    check_normal("at last")
    return counts
