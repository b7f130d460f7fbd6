"""What fairseq 0.12 expects of older libraries and newer ones no longer have."""

from types import SimpleNamespace

import numpy as np


def restore_numpy_long() -> None:
    """``--sample-break-mode eos``, and with it all generation from a language model, asks for np.compat.long."""
    if not hasattr(np, "compat"):
        np.compat = SimpleNamespace(long=np.int64)
