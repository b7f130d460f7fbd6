"""fairseq-knnlm: nearest-neighbour language models for fairseq.

``--user-dir fairseq_knnlm`` imports this package, and with it the plugin. The modules that need no fairseq can be
used without loading it, which is why the plugin is imported only into a process that has it already.
"""

import sys

from .errors import KnnlmError

__version__ = "0.1.0"
__all__ = ["KnnlmError", "__version__"]

if "fairseq.tasks" in sys.modules:
    from . import plugin  # noqa: F401
