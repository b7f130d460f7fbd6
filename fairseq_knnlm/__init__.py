"""fairseq-knnlm: nearest-neighbour language models for fairseq.

``--user-dir fairseq_knnlm`` lets fairseq import the folders ``tasks`` and ``models``, which register what it has to
know. Importing the package alone is light: it registers nothing, and loads neither fairseq nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import KnnlmError

if TYPE_CHECKING:
    from .api import KNNLM
    from .datastore import Datastore, DatastoreWriter, Manifest
    from .index import build_index, open_index

__version__ = "0.1.0"
__all__ = [
    "KNNLM",
    "Datastore",
    "DatastoreWriter",
    "KnnlmError",
    "Manifest",
    "__version__",
    "build_index",
    "open_index",
]

# The names that a program uses, and the rooms that they are in; a room is entered when its name is first used.
_ROOMS = {
    "KNNLM": "api",
    "Datastore": "datastore",
    "DatastoreWriter": "datastore",
    "Manifest": "datastore",
    "build_index": "index",
    "open_index": "index",
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(import_module(f".{_ROOMS[name]}", __name__), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
