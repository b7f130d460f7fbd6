"""FAISS indexes of a datastore: what a spec means, building, opening, checking.

    DIR/index/<name>/index.json     spec, resolved factory string, metric, which keys it was built from
    DIR/index/<name>/index.faiss    an ordinary FAISS index (absent for ``flat``, which searches the stored keys)

To describe indexes takes neither FAISS nor torch, so a module is imported when one of its names is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import build_index, build_index_if_missing
    from .info import IndexInfo, describe_index, extract_ivf, index_file, index_name, list_indexes, open_index
    from .plan import IndexPlan, plan_index

__all__ = [
    "IndexInfo",
    "IndexPlan",
    "build_index",
    "build_index_if_missing",
    "describe_index",
    "extract_ivf",
    "index_file",
    "index_name",
    "list_indexes",
    "open_index",
    "plan_index",
]

_MODULES = {"build_index": "build", "build_index_if_missing": "build", "IndexPlan": "plan", "plan_index": "plan"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f".{_MODULES.get(name, 'info')}", __name__), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
