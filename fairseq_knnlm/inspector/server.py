"""The page, live: type a text, see it scored and continued. Loopback only unless asked otherwise."""

import json
import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from ..api import KNNLM
from ..errors import KnnlmError
from ..storage import to_json
from .collect import Inspector
from .connections import LimitedServer
from .http import JsonHandler, RequestError
from .page import build_page

logger = logging.getLogger(__name__)

MAX_TOKENS = 2000  # of a text
NEW_TOKENS = 40
TOP_P = 0.9
LOOPBACK = ("127.0.0.1", "localhost")


class Live(Protocol):
    """What the server needs to answer; it calls one method at a time."""

    def score(self, text: str) -> dict: ...

    def continue_(self, text: str) -> dict: ...


class LiveInspector:
    """Scores and continues texts. Call it for one text at a time, because there is one model."""

    def __init__(self, inspector: Inspector):
        self.inspector = inspector
        self._lm = KNNLM(inspector.scorer)

    def score(self, text: str) -> dict:
        return {"data": self.inspector.inspect(self._encode(text))}

    def continue_(self, text: str) -> dict:
        """The text with some more tokens, sampled from the best part of the mixture's mass."""
        lines = self._encode(text)
        prompt = lines[-1][:-1]  # without the end of the line
        started = time.perf_counter()
        words = self._lm.sample_words(prompt, NEW_TOKENS, TOP_P)
        note = f"{1000 * (time.perf_counter() - started) / max(1, len(words)):.0f} ms per token"
        longer = f"{text.rstrip()} {' '.join(words)}"
        return {"text": longer, "note": note, "data": self.inspector.inspect(self._encode(longer))}

    def _encode(self, text: str) -> list[list[int]]:
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            raise KnnlmError("there is no text; type some words")
        sequences = [self.inspector.scorer.encode(line) for line in lines]
        tokens = sum(map(len, sequences))
        if tokens > MAX_TOKENS:
            raise KnnlmError(f"the text has {tokens:,} tokens; give at most {MAX_TOKENS:,} at a time")
        return sequences


class Handler(JsonHandler):
    """Four fixed addresses; no path of a request ever becomes a path of the disk."""

    is_loopback: bool
    page: bytes
    actions: dict[str, Callable[[str], dict]]
    server: LimitedServer

    def respond(self) -> tuple[str, bytes]:
        self._check_host()
        if self.path in ("/", "/index.html"):
            self._check_method("GET")
            return "text/html; charset=utf-8", self.page
        if self.path == "/favicon.ico":
            self._check_method("GET")
            return "image/x-icon", b""
        if self.path in self.actions:
            self._check_method("POST")
            self._check_type()
            return "application/json", self._act(_text_of(self.read_body()))
        raise RequestError(HTTPStatus.NOT_FOUND, "there is no such page")

    def _check_host(self) -> None:
        """Refuse a name of somebody else that was made to point here (DNS rebinding)."""
        names = [name.strip().lower().rsplit(":", 1)[0] for name in self.headers.get_all("Host", [""])]
        if self.is_loopback and not all(name in LOOPBACK for name in names):
            raise RequestError(HTTPStatus.FORBIDDEN, "use the address that was printed")

    def _check_method(self, method: str) -> None:
        if self.command != method:
            raise RequestError(HTTPStatus.METHOD_NOT_ALLOWED, f"use {method} here", allowed=method)

    def _check_type(self) -> None:
        """Pages of other sites can post forms here, but not this type without asking first."""
        if self.headers.get("Content-Type", "").split(";")[0].strip().lower() != "application/json":
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send application/json")

    def _act(self, text: str) -> bytes:
        """Score or continue the text. What fails there is one sentence for the client and one line of the log."""
        try:
            with self.server.one_at_a_time:
                if self.server.is_ending:
                    raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is ending")
                content = self.actions[self.path](text)
            return to_json(content).encode()
        except RequestError:
            raise
        except KnnlmError as error:
            raise RequestError(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
        except Exception as error:
            is_verbose = logger.isEnabledFor(logging.DEBUG)
            logger.error("%s failed: %s: %s", self.path, type(error).__name__, error, exc_info=is_verbose)
            sentence = f"the text could not be processed ({type(error).__name__}); the server's log says more"
            raise RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, sentence) from error


def _text_of(body: bytes) -> str:
    """The text of a body {"text": "..."}; what cannot be text never reaches the model."""
    try:
        content = json.loads(body.decode())
    except RecursionError as error:
        raise RequestError(HTTPStatus.BAD_REQUEST, "the JSON is nested too deeply") from error
    except ValueError as error:
        raise RequestError(HTTPStatus.BAD_REQUEST, "the body is not JSON in UTF-8") from error
    text = content.get("text") if isinstance(content, dict) else None
    if not isinstance(text, str):
        raise RequestError(HTTPStatus.BAD_REQUEST, 'send {"text": "..."}')
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise RequestError(HTTPStatus.BAD_REQUEST, "the text has NUL characters or halves of surrogate pairs")
    return text


def make_server(live: Live, host: str, port: int) -> LimitedServer:
    """A server that listens at this address, but does not answer before it is run."""

    class LiveHandler(Handler):
        is_loopback = host in LOOPBACK
        page = build_page(None, live=True).encode()
        actions = {"/score": live.score, "/continue": live.continue_}

    try:
        return LimitedServer((host, port), LiveHandler)
    except (OSError, OverflowError) as error:  # overflow: of the port
        reason = getattr(error, "strerror", None) or error
        raise KnnlmError(f"port {port} of {host} cannot be used ({reason}); choose another with --port") from error
