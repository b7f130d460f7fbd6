"""What fairseq raises for a file that is no checkpoint, or of another model, as one sentence."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import KnnlmError


@contextmanager
def one_sentence_for(path: str | Path, advice: str) -> Iterator[None]:
    """While a checkpoint is loaded; ``advice`` says what to give instead."""
    if not Path(path).is_file():
        raise KnnlmError(f"there is no checkpoint {path}; give a file that fairseq-train wrote")
    try:
        yield
    except KnnlmError:
        raise
    except Exception as error:  # fairseq raises nearly anything
        reason = " ".join(str(error).split())
        if isinstance(error, pickle.UnpicklingError):  # whose advice is to switch the safety off
            reason = "it is no checkpoint, or holds objects that could run code"
        raise KnnlmError(f"{path} cannot be loaded as a checkpoint of this data ({reason:.200}); {advice}") from error
