"""The page, live: type a text, see it scored and continued. Loopback only unless asked otherwise."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

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
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-4, 1e6  # beyond these, distances divided by it are no float32 any more
LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Settings:
    """What the page's sliders say: one number for each datastore, or None for those of the command line."""

    weights: list[float] | None = None  # lambdas
    temperatures: list[float] | None = None


AS_STARTED = Settings()


class Live(Protocol):
    """What the server needs to answer; it calls one method at a time."""

    def score(self, text: str, settings: Settings = AS_STARTED) -> dict: ...

    def continue_(self, text: str, settings: Settings = AS_STARTED) -> dict: ...


class LiveInspector:
    """Scores and continues texts. Call it for one text at a time, because there is one model."""

    def __init__(self, inspector: Inspector):
        self.inspector = inspector
        self._lm = KNNLM(inspector.scorer)

    def score(self, text: str, settings: Settings = AS_STARTED) -> dict:
        with self._using(settings):
            return {"data": self.inspector.inspect(self._encode(text))}

    def continue_(self, text: str, settings: Settings = AS_STARTED) -> dict:
        """The text with some more tokens, sampled from the best part of the mixture's mass."""
        self._encode(text)  # refuses what is too long
        form = self.inspector.scorer.text
        prompt = form.prompt(text if form.has_own_tokenizer else text.rstrip().splitlines()[-1])
        with self._using(settings):
            started = time.perf_counter()
            tokens = self._lm.sample_tokens(prompt, NEW_TOKENS, TOP_P)
            note = f"{1000 * (time.perf_counter() - started) / max(1, len(tokens)):.0f} ms per token"
            longer = form.continued(text, tokens)
            return {"text": longer, "note": note, "data": self.inspector.inspect(self._encode(longer))}

    @contextmanager
    def _using(self, settings: Settings) -> Iterator[None]:
        """The memories with other weights and temperatures, for one answer."""
        memories: list[Any] = list(self.inspector.scorer.memories)  # datastores and heads, which have a temperature
        before = [(memory.weight, memory.temperature) for memory in memories]
        weights = _checked(settings.weights, [weight for weight, _ in before], "lambda")
        temperatures = _checked(settings.temperatures, [temperature for _, temperature in before], "temperature")
        if min(weights, default=0.0) < 0 or sum(weights) > 1 + 1e-9:
            raise KnnlmError("each lambda must be between 0 and 1, and their sum at most 1")
        if not all(LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE for temperature in temperatures):
            raise KnnlmError(f"a temperature must be between {LEAST_TEMPERATURE:g} and {MOST_TEMPERATURE:g}")
        try:
            for memory, weight, temperature in zip(memories, weights, temperatures):
                memory.weight, memory.temperature = weight, temperature
            yield
        finally:
            for memory, (weight, temperature) in zip(memories, before):
                memory.weight, memory.temperature = weight, temperature

    def _encode(self, text: str) -> list[list[int]]:
        sequences = self.inspector.scorer.text.sequences(text)
        if not sequences:
            raise KnnlmError("there is no text; type some words")
        tokens = sum(map(len, sequences))
        if tokens > MAX_TOKENS:
            raise KnnlmError(f"the text has {tokens:,} tokens; give at most {MAX_TOKENS:,} at a time")
        return sequences


def _checked(chosen: list[float] | None, default: list[float], name: str) -> list[float]:
    if chosen is None:
        return default
    if len(chosen) != len(default):
        raise KnnlmError(f"there are {len(chosen)} values of {name} for {len(default)} datastores; send one for each")
    return chosen


class Handler(JsonHandler):
    """Four fixed addresses; no path of a request ever becomes a path of the disk."""

    is_loopback: bool
    page: bytes
    actions: dict[str, Callable[[str, Settings], dict]]
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
            return "application/json", self._act(*_question_of(self.read_body()))
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

    def _act(self, text: str, settings: Settings) -> bytes:
        """Score or continue the text. What fails there is one sentence for the client and one line of the log."""
        try:
            with self.server.one_at_a_time:
                if self.server.is_ending:
                    raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is ending")
                content = self.actions[self.path](text, settings)
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


def _question_of(body: bytes) -> tuple[str, Settings]:
    """What a body {"text": "...", "lambda": [0.2], "temperature": [10]} asks; the last two may be left out.

    What cannot be text or a number never reaches the model.
    """
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
    return text, Settings(_numbers_of(content, "lambda"), _numbers_of(content, "temperature"))


def _numbers_of(content: dict[str, Any], name: str) -> list[float] | None:
    values = content.get(name)
    if values is None:
        return None
    if not isinstance(values, list) or not all(_is_finite(value) for value in values):
        raise RequestError(HTTPStatus.BAD_REQUEST, f'send "{name}" as a list of numbers, or leave it out')
    return [float(value) for value in values]


def _is_finite(value: Any) -> bool:
    # bool is a kind of int in Python, and an int may be too large for a float
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < 1e300 and not math.isnan(value)


def make_server(live: Live, host: str, port: int, examples: Sequence[str] = ()) -> LimitedServer:
    """A server that listens at this address, but does not answer before it is run. Its page offers the examples."""

    class LiveHandler(Handler):
        is_loopback = host in LOOPBACK
        page = build_page(None, live=True, examples=examples).encode()
        actions = {"/score": live.score, "/continue": live.continue_}

    try:
        return LimitedServer((host, port), LiveHandler)
    except (OSError, OverflowError) as error:  # overflow: of the port
        reason = getattr(error, "strerror", None) or error
        raise KnnlmError(f"port {port} of {host} cannot be used ({reason}); choose another with --port") from error
