"""FAISS indexes of a datastore: what a spec means, building, opening, checking.

    DIR/index/<name>/index.json     spec, resolved factory string, metric, which keys it was built from
    DIR/index/<name>/index.faiss    an ordinary FAISS index (absent for ``flat``, which searches the stored keys)
"""

from .build import build_index, build_index_if_missing
from .info import IndexInfo, extract_ivf, index_file, index_name, list_indexes, open_index
from .plan import IndexPlan, plan_index

__all__ = [
    "IndexInfo",
    "IndexPlan",
    "build_index",
    "build_index_if_missing",
    "extract_ivf",
    "index_file",
    "index_name",
    "list_indexes",
    "open_index",
    "plan_index",
]
