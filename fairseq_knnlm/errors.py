"""One exception for everything that a user can fix, shown as one sentence instead of a traceback."""

import importlib.util
import sys
from types import TracebackType


class KnnlmError(Exception):
    """A problem that the user can solve; the message names the remedy."""


def show_knnlm_errors_as_one_sentence() -> None:
    """Install an excepthook, because the stock fairseq commands print whatever leaves them as a traceback.

    The exit code stays 1, and every other exception is shown as before.
    """
    previous_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if issubclass(kind, KnnlmError):
            print(f"error: {error}", file=sys.stderr)
        else:
            previous_hook(kind, error, traceback)

    sys.excepthook = hook


def check_faiss_is_installed() -> None:
    """FAISS is an extra, because the CPU and the GPU wheel provide the same module and overwrite each other."""
    if importlib.util.find_spec("faiss") is None:
        raise KnnlmError("faiss is missing; run pip install faiss-cpu, or faiss-gpu-cu12 where there is a GPU")
