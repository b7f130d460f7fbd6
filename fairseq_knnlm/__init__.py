"""fairseq-knnlm: nearest-neighbour language models for fairseq.

``--user-dir fairseq_knnlm`` imports this package, and with it everything that fairseq has to know.
"""

import logging

from .errors import KnnlmError, check_faiss_is_installed, show_knnlm_errors_as_one_sentence

__version__ = "0.1.0"
__all__ = ["KnnlmError", "__version__"]

for chatty in ("faiss", "fairseq.tasks.text_to_speech"):  # say at import what nobody asked
    logging.getLogger(chatty).setLevel(logging.WARNING)
show_knnlm_errors_as_one_sentence()
check_faiss_is_installed()

from .compat import restore_numpy_long  # noqa: E402

restore_numpy_long()

from . import checkpoints, spalm, task  # noqa: E402, F401  allow-lists old checkpoints, registers models and tasks
