"""Everything that a user can fix, or has caused by Ctrl-C, is shown as one sentence instead of a traceback."""

import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

INTERRUPTED = 130  # the exit code that shells know for Ctrl-C
NO_FAISS = "faiss is missing; run pip install faiss-cpu, or faiss-gpu-cu12 where there is a GPU"


def is_verbose() -> bool:
    """Whether the user wants to see everything."""
    return os.environ.get("KNNLM_VERBOSE", "") not in ("", "0")


class KnnlmError(Exception):
    """A problem that the user can solve; the message names the remedy."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with a sentence that says how to go on."""


@contextmanager
def resumable(how: str) -> Iterator[None]:
    """Where Ctrl-C loses little: ``how`` says what the user does to go on."""
    try:
        yield
    except Interrupted:  # something inside knows better
        raise
    except KeyboardInterrupt as error:
        raise Interrupted(how) from error


def sentence_for(error: BaseException) -> str | None:
    """What to show instead of a traceback; None: the traceback, since it is no mistake of the user."""
    if isinstance(error, KeyboardInterrupt):
        how = str(error) or "what is finished stays; run the same command again"
        return f"interrupted; {how}"
    if isinstance(error, KnnlmError):
        return f"error: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name == "faiss":
        return f"error: {NO_FAISS}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"error: {error.filename} cannot be used: {error.strerror or error}"
    return None


def show_errors_as_one_sentence() -> None:
    """Install an excepthook, because the stock fairseq commands print whatever leaves them as a traceback.

    The exit code stays 1, and 130 after Ctrl-C. Errors of other programs are shown as before, so an error of a file is
    ours only where our code asked for the file. ``KNNLM_VERBOSE=1`` shows the traceback as well.
    """
    previous_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sentence = sentence_for(error)
        if isinstance(error, OSError):
            if str(error).startswith("Model file not found"):  # fairseq's own words for a wrong --path
                sentence = f"error: {error}; give --path a file that fairseq-train wrote"
            elif not _is_ours(trace):
                sentence = None
        if sentence is None or is_verbose():
            previous_hook(kind, error, trace)
        if sentence is not None:
            print(sentence, file=sys.stderr)
        if isinstance(error, KeyboardInterrupt):
            sys.exit(INTERRUPTED)

    sys.excepthook = hook


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether an error came through this package."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(trace))
    return any(name.split(".")[0] == __package__ for name in modules)


def check_faiss_is_installed() -> None:
    """FAISS is an extra, because the CPU and the GPU wheel provide the same module and overwrite each other."""
    if importlib.util.find_spec("faiss") is None:
        raise KnnlmError(NO_FAISS)
