"""The page, live: type a text, see it scored and continued. Loopback only unless asked otherwise."""

import json
import logging
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

import torch
from fairseq.search import Sampling
from fairseq.sequence_generator import SequenceGenerator

from ..errors import KnnlmError
from ..generation import KNNLanguageModel
from .collect import Inspector
from .page import build_page

logger = logging.getLogger(__name__)

MAX_BYTES = 64 * 1024  # of a request
MAX_TOKENS = 2000  # of a text
NEW_TOKENS = 40


class LiveInspector:
    """Scores and continues texts; one at a time, because there is one model."""

    def __init__(self, inspector: Inspector):
        self.inspector, self._lock = inspector, Lock()
        scorer = inspector.scorer
        self._model = KNNLanguageModel(scorer.model, scorer.retrievers)

    def score(self, text: str) -> dict:
        with self._lock:
            return {"data": self.inspector.inspect(self._encode(text))}

    def continue_(self, text: str) -> dict:
        """The text with some more tokens, sampled from the best 90% of the mixture's mass."""
        with self._lock:
            lines = self._encode(text)
            prompt = lines[-1][:-1]  # without the end of the line
            started = time.perf_counter()
            words = self._generate(prompt)
            note = f"{1000 * (time.perf_counter() - started) / max(1, len(words)):.0f} ms a token"
            longer = f"{text.rstrip()} {' '.join(words)}"
            return {"text": longer, "note": note, "data": self.inspector.inspect(self._encode(longer))}

    @torch.no_grad()
    def _generate(self, prompt: list[int]) -> list[str]:
        scorer = self.inspector.scorer
        dictionary, limit = scorer.dictionary, self._model.max_positions()
        prompt = prompt[-(limit - NEW_TOKENS - 2) :] if limit else prompt
        generator = SequenceGenerator(
            [self._model], dictionary, beam_size=1, max_len_a=0, max_len_b=len(prompt) + NEW_TOKENS,
            search_strategy=Sampling(dictionary, sampling_topp=0.9),
        )  # fmt: skip
        prefix = torch.tensor([prompt], device=scorer.device)
        sample = {"net_input": {"src_tokens": prefix, "src_lengths": torch.tensor([len(prompt)])}}
        tokens = generator.generate(
            [self._model], sample, prefix_tokens=prefix if prompt else None, bos_token=dictionary.eos()
        )[0][0]["tokens"].tolist()
        return [dictionary[token] for token in tokens[len(prompt) :] if token != dictionary.eos()]

    def _encode(self, text: str) -> list[list[int]]:
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            raise KnnlmError("there is no text; type some words")
        sequences = [self.inspector.scorer.encode(line) for line in lines]
        tokens = sum(map(len, sequences))
        if tokens > MAX_TOKENS:
            raise KnnlmError(f"the text has {tokens:,} tokens; give at most {MAX_TOKENS:,} at a time")
        return sequences


def make_server(live: LiveInspector, host: str, port: int) -> ThreadingHTTPServer:
    page = build_page(None, live=True).encode()
    routes = {"/score": live.score, "/continue": live.continue_}

    class Handler(BaseHTTPRequestHandler):
        """Three fixed addresses; no path of a request ever becomes a path of the disk."""

        def do_GET(self) -> None:
            if not self._is_addressed_here():
                return
            if self.path in ("/", "/index.html"):
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", page)
            elif self.path == "/favicon.ico":
                self._send(HTTPStatus.NO_CONTENT, "image/x-icon", b"")
            else:
                self._answer(HTTPStatus.NOT_FOUND, {"error": "there is no such page"})

        def do_POST(self) -> None:
            if not self._is_addressed_here():
                return
            if self.path not in routes:
                self._answer(HTTPStatus.NOT_FOUND, {"error": "there is no such page"})
                return
            # Pages of other sites can post forms here, but not this type without asking first.
            if self.headers.get("Content-Type", "").split(";")[0] != "application/json":
                self._answer(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, {"error": "send application/json"})
                return
            length = self.headers.get("Content-Length", "")
            if not length.isdigit() or int(length) > MAX_BYTES:
                self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": "the text is too long"})
                return
            try:
                text = json.loads(self.rfile.read(int(length)))["text"]
                if not isinstance(text, str):
                    raise TypeError
            except (ValueError, KeyError, TypeError):
                self._answer(HTTPStatus.BAD_REQUEST, {"error": 'send {"text": "..."}'})
                return
            try:
                self._answer(HTTPStatus.OK, routes[self.path](text))
            except KnnlmError as error:
                self._answer(HTTPStatus.OK, {"error": str(error)})

        def _is_addressed_here(self) -> bool:
            """A name of somebody else that was made to point here (DNS rebinding) is refused."""
            name = self.headers.get("Host", "").rsplit(":", 1)[0]
            if host in ("127.0.0.1", "localhost") and name not in ("127.0.0.1", "localhost"):
                self._answer(HTTPStatus.FORBIDDEN, {"error": "use the address that was printed"})
                return False
            return True

        def _answer(self, status: HTTPStatus, content: dict) -> None:
            self._send(status, "application/json", json.dumps(content).encode())

        def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments) -> None:
            logger.debug(format, *arguments)

    try:
        return ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise KnnlmError(
            f"port {port} of {host} cannot be used ({error.strerror}); choose another with --port"
        ) from error
