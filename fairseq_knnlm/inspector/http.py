"""One HTTP request: received before a deadline, whatever a client sends, and answered with JSON if it is wrong."""

import io
import socket
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from ..storage import to_json

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

REQUEST_SECONDS = 20.0  # for a whole request to arrive
ANSWER_SECONDS = 60.0  # for a client to take its whole answer
LINGER_SECONDS = 1.0  # for a refused client to read why
MAX_BYTES = 64 * 1024  # of a body
MAX_LINE = 64 * 1024  # bytes of a request line

# What the base class finds wrong with a request, in our words.
SENTENCES = {
    HTTPStatus.BAD_REQUEST: "this is no HTTP request",
    HTTPStatus.REQUEST_URI_TOO_LONG: "the request line is too long",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "the headers are too long or too many",
    HTTPStatus.HTTP_VERSION_NOT_SUPPORTED: "use HTTP/1.0 or HTTP/1.1",
}


class RequestError(Exception):
    """A request that gets an error as its answer: a status, a sentence, and which methods are allowed instead."""

    def __init__(self, status: int, sentence: str, allowed: str = ""):
        super().__init__(sentence)
        self.status, self.allowed = HTTPStatus(status), allowed


class DeadlineReader(io.RawIOBase):
    """Reads a socket until a deadline for everything, since a timeout per read lets a byte per second go on forever."""

    def __init__(self, connection: socket.socket, seconds: float):
        self._connection, self.deadline = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        remaining = self.deadline - time.monotonic()
        if remaining > 0:
            self._connection.settimeout(remaining)
            with suppress(TimeoutError):
                return self._connection.recv_into(buffer)
        raise RequestError(HTTPStatus.REQUEST_TIMEOUT, "the request took too long to arrive")


class JsonHandler(BaseHTTPRequestHandler):
    """One request per connection. Subclasses define ``respond``; every ``RequestError`` becomes a JSON answer."""

    disable_nagle_algorithm = True  # headers and content are two writes, and the second should not wait

    def respond(self) -> tuple[str, bytes]:
        """Type and content of the answer to a request whose head has arrived."""
        raise NotImplementedError

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._reader = DeadlineReader(self.connection, REQUEST_SECONDS)
        self.rfile = io.BufferedReader(self._reader)
        self.command, self.requestline = "", ""  # for answers to requests that never tell
        self._is_received = False

    def handle(self) -> None:
        try:
            self.raw_requestline = self.rfile.readline(MAX_LINE + 1)
            if not self.raw_requestline:  # browsers open connections in case they need one
                return
            if len(self.raw_requestline) > MAX_LINE:
                self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG)
            if not self.parse_request():
                self.send_error(HTTPStatus.BAD_REQUEST)
            self._is_received = "Content-Length" not in self.headers and "Transfer-Encoding" not in self.headers
            kind, content = self.respond()
        except RequestError as error:
            content = to_json({"error": str(error)}).encode()
            self._send(error.status, "application/json", content, error.allowed)
        else:
            self._send(HTTPStatus.OK if content else HTTPStatus.NO_CONTENT, kind, content)

    def read_body(self) -> bytes:
        """The whole body, of a length that is stated beforehand, because only then can it be refused beforehand."""
        lengths = set(self.headers.get_all("Content-Length", []))
        if "Transfer-Encoding" in self.headers or not lengths:
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, "send Content-Length and no Transfer-Encoding")
        length = lengths.pop().strip()
        if lengths or not (length.isascii() and length.isdigit()):
            raise RequestError(HTTPStatus.BAD_REQUEST, "Content-Length is not one number")
        # Python refuses to read numbers of thousands of digits, so the digits are counted first.
        length = length.lstrip("0") or "0"
        if len(length) > len(str(MAX_BYTES)) or int(length) > MAX_BYTES:
            sentence = f"the text is too long; send at most {MAX_BYTES:,} bytes"
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, sentence)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise RequestError(HTTPStatus.BAD_REQUEST, "the body is shorter than Content-Length says")
        self._is_received = True
        return body

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Replace the base class's page of HTML, which only people would read."""
        raise RequestError(code, SENTENCES.get(HTTPStatus(code)) or message or HTTPStatus(code).phrase)

    def _send(self, status: HTTPStatus, kind: str, content: bytes, allowed: str = "") -> None:
        self.connection.settimeout(ANSWER_SECONDS)
        self.request_version = self.protocol_version  # HTTP/0.9 would get no status
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        if allowed:
            self.send_header("Allow", allowed)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def finish(self) -> None:
        """Read for a moment what the client still sends; closing before that would reset what it should read."""
        if not self._is_received:
            with suppress(OSError, RequestError):
                self.connection.shutdown(socket.SHUT_WR)
                self._reader.deadline = time.monotonic() + LINGER_SECONDS
                while self.rfile.read1(MAX_BYTES):
                    pass
        super().finish()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing of requests: what a person asked for is on the page, and what failed is logged where it did."""
