"""One exception for everything a user can mend, shown as one sentence instead of a traceback."""

import sys


class KnnlmError(Exception):
    """A problem that the user can solve; the message names the remedy."""


def show_knnlm_errors_as_one_sentence() -> None:
    """Install an excepthook, because the stock fairseq commands print whatever leaves them as a traceback.

    The exit code stays 1, and every other exception is shown as before.
    """
    previous_hook = sys.excepthook

    def hook(kind, error, traceback):
        if issubclass(kind, KnnlmError):
            print(f"error: {error}", file=sys.stderr)
        else:
            previous_hook(kind, error, traceback)

    sys.excepthook = hook
