"""Many HTTP connections at once, up to a bound, until a signal ends the server."""

import errno
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from http.server import ThreadingHTTPServer
from threading import Condition, Lock

from ..storage import to_json
from .http import LINGER_SECONDS, JsonHandler

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1500  # at once, one thread each
MAX_REFUSED = 500  # refused connections that stay open for a moment
ENDING_SECONDS = 5.0  # for answers under way when the server ends
POLL_SECONDS = 0.2  # between looks at what is overdue
OPEN_FILES = 4096  # enough for all connections and for the memory maps of the datastores
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
FULL = "the server has too many connections; try again in a moment"


class LimitedServer(ThreadingHTTPServer):
    """A thread per connection, up to a number of connections; more are told to come back."""

    request_queue_size = 1024  # connections that wait to be accepted; the kernel drops what exceeds this
    server_address: tuple[str, int]  # as the kernel says it, which for IPv4 are these two

    def __init__(self, address: tuple[str, int], handler: type[JsonHandler]):
        self.one_at_a_time = Lock()  # for handlers, because there is one model
        self.is_ending = False
        self._connections: set[socket.socket] = set()
        self._changed = Condition()  # guards _connections
        self._refused: deque[tuple[float, socket.socket]] = deque()
        _allow_open_files()
        super().__init__(address, handler)

    def catch_signals(self) -> None:
        """Let SIGINT and SIGTERM end ``run`` instead of raising, since what a signal raises can land anywhere."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.stop)

    def stop(self, *_: object) -> None:
        """Ask ``run`` to return; only sets a flag, so a signal may interrupt anything to call it."""
        self.is_ending = True

    def run(self) -> None:
        """Serve until ``stop``, then close and let the answers under way end."""
        with suppress(_Ending):
            self.serve_forever(POLL_SECONDS)
        self.server_close()
        with self._changed:
            are_done = self._changed.wait_for(lambda: not self._connections, ENDING_SECONDS)
        if not are_done:
            # A thread that returns from PyTorch into an interpreter that is ending aborts the process.
            with suppress(OSError):  # nobody may be reading any more
                sys.stdout.flush()
            os._exit(0)

    def server_close(self) -> None:
        """Also end connections whose request has not arrived; requests that wait for the model see ``is_ending``."""
        self.is_ending = True
        super().server_close()
        while self._refused:
            self._refused.popleft()[1].close()
        with self._changed:
            for connection in self._connections:
                with suppress(OSError):  # it may just have been closed
                    connection.shutdown(socket.SHUT_RD)

    def service_actions(self) -> None:
        """End where that is asked for, and close refused connections; called after each poll and each connection."""
        if self.is_ending:
            raise _Ending
        while self._refused and (self._refused[0][0] < time.monotonic() or len(self._refused) > MAX_REFUSED):
            self._refused.popleft()[1].close()

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in OUT_OF_FILES:  # the connection stays in the queue, so trying at once would not end
                time.sleep(POLL_SECONDS)
            raise

    def process_request(  # type: ignore[override]  # the base class's types allow for the requests of UDP, too
        self, request: socket.socket, client_address: tuple[str, int]
    ) -> None:
        with self._changed:
            is_full = len(self._connections) >= MAX_CONNECTIONS
            if not is_full:
                self._connections.add(request)
        if is_full:
            self._refuse(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system allows no more threads
            self._forget(request)
            self._refuse(request)

    def process_request_thread(  # type: ignore[override]  # as above
        self, request: socket.socket, client_address: tuple[str, int]
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        with self._changed:
            self._connections.discard(request)
            self._changed.notify_all()

    def _refuse(self, request: socket.socket) -> None:
        """Answer in this thread, which never blocks: the answer fits into the socket's empty buffer."""
        content = to_json({"error": FULL})
        head = f"HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        with suppress(OSError):
            request.setblocking(False)
            request.send(f"{head}\r\nRetry-After: 1\r\n\r\n{content}".encode())
            request.shutdown(socket.SHUT_WR)
        # Closing now would reset the connection if the client is still sending.
        self._refused.append((time.monotonic() + LINGER_SECONDS, request))

    def handle_error(self, request: object, client_address: tuple[str, int]) -> None:
        """Log what leaves a handler; that a client went away early is nothing unusual."""
        error = sys.exception()
        if isinstance(error, OSError):
            logger.debug("a connection broke: %s", error)
        else:
            logger.error("a request failed: %r", error, exc_info=logger.isEnabledFor(logging.DEBUG))


class _Ending(Exception):
    """Leaves ``serve_forever`` from its own thread, where ``shutdown`` would wait for itself."""


def _allow_open_files() -> None:
    """Raise the soft limit of open files, which often is 1,024, as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
