"""Locks between processes: one works, the others wait for it or are told."""

import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from ..errors import KnnlmError
from .faults import write_failure

logger = logging.getLogger(__name__)

NO_LOCKS = "KNNLM_NO_LOCKS"
SECONDS_BETWEEN_TRIES = 0.1
SECONDS_BETWEEN_MESSAGES = 30


class Lock:
    """An exclusive lock on a piece of work. The kernel frees it when its holder dies, so it never needs removing.

    Usage: ``with Lock(path, "building the index auto"): ...``
    """

    def __init__(self, path: Path, doing: str, wait: bool = True, instead: str = ""):
        """
        Args:
            doing: what the holder does, for the message to the others
            wait: whether the others wait for it; if not, they fail
            instead: what a user can do who does not want to wait
        """
        self._descriptor, self._owner = -1, os.getpid()
        self.path, self._doing, self._wait, self._instead = path, doing, wait, instead

    def acquire(self) -> None:
        if os.environ.get(NO_LOCKS):
            return
        told = 0.0
        while not self._try():
            if not self._wait:
                instead = f", or {self._instead}" if self._instead else ""
                raise KnnlmError(f"{self._holder()} is {self._doing}; wait for it{instead}")
            if time.monotonic() - told > SECONDS_BETWEEN_MESSAGES:
                logger.info(f"{self._holder()} is {self._doing}; waiting for it to finish")
                told = time.monotonic()
            time.sleep(SECONDS_BETWEEN_TRIES)

    def _try(self) -> bool:
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise write_failure(error, self.path) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError as error:
            os.close(descriptor)
            raise KnnlmError(
                f"the file system of {self.path.parent} has no file locks ({error.strerror}); use another one, or set "
                f"{NO_LOCKS}=1 and make sure that no two processes work on the folder at once"
            ) from error
        # A holder removes the file before it lets go, so this may be a file without a name that locks nothing.
        if os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)
            return False
        os.truncate(descriptor, 0)
        os.write(descriptor, f"another process ({os.getpid()} on {socket.gethostname()})".encode())
        self._descriptor = descriptor
        return True

    def _holder(self) -> str:
        try:
            return self.path.read_text() or "another process"
        except OSError:
            return "another process"

    def release(self) -> None:
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also for processes that were forked while it was held
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if os.getpid() == self._owner:  # a forked process has a copy of this object, but does not hold the lock
            self.release()

    def __enter__(self) -> "Lock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
