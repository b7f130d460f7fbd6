"""How much of a datastore takes part for one query: neighbours, lists that are visited, lists of the far field."""

import logging
import re
from typing import Any

from ..errors import KnnlmError
from ..index import IndexInfo
from ..index.list_files import knows_spreads
from .presets import flag

logger = logging.getLogger(__name__)

NUMBER = 1024  # of neighbours, where not every entry can take part
NPROBE, FAR = 32, 64


def lists_to_visit(args: Any) -> int:
    """--knn-nprobe."""
    nprobe = flag(args, "knn_nprobe")
    return NPROBE if nprobe is None else nprobe


def lists_of_far_field(args: Any, k: int | None, info: IndexInfo | None) -> int:
    """--knn-far, for an index that is searched for k neighbours (None: every visited entry).

    Nobody has to ask for it, but who says which lists are visited gets these and no others.
    """
    can_be = k is None and str(args.knn_metric) == "l2" and info is not None and knows_spreads(info)
    if args.knn_far is not None:
        far = parse_far(args.knn_far, k)
        if far and (info is None or info.factory is None):
            logger.info("--knn-far does nothing without inverted lists: every entry takes part as it is")
            return 0
        return far
    of_preset = flag(args, "knn_far")
    if of_preset is None:
        of_preset = FAR if flag(args, "knn_nprobe") is None else 0
    return of_preset if can_be else 0


def why_not_all(args: Any, indexes: list[IndexInfo | None]) -> str:
    """Why not every visited entry can take part; empty if it can."""
    if str(args.knn_score) == "index":
        return "--knn-score index needs a number of neighbours"
    for info in indexes:
        if info is not None and info.factory is not None and "IVF" not in info.factory:
            return f"the index {info.name} ({info.factory}) has no inverted lists, so it needs a number of neighbours"
    return ""


def parse_k(value: object) -> int | None:
    """--knn-k: a number, or None for 'all'."""
    text = str(value)
    if text == "all":
        return None
    if not text.isdigit() or int(text) < 1:
        raise KnnlmError(f"--knn-k takes a number from 1 up or 'all', not '{text}'")
    return int(text)


def limit_k(k: int | None, entries: list[int], can_be_all: bool) -> int | None:
    """At most as many neighbours as there are: then every visited entry takes part, which needs no selection."""
    if k is None or k <= max(entries):
        return k
    above = f"--knn-k {k} is above the {max(entries):,} entries"
    if can_be_all:
        logger.info(f"{above}, so every visited entry takes part, as with --knn-k all")
        return None
    logger.info(f"{above}, so k is {max(entries)}")
    return max(entries)


def parse_far(far: int, k: int | None) -> int:
    """--knn-far: how many lists are in the far field."""
    if far < 0:
        raise KnnlmError(f"--knn-far must be 0 or more, not {far}")
    if far and k is not None:
        raise KnnlmError("--knn-far goes with --knn-k all; give that, too, or leave --knn-far out")
    return far


def limit_nprobe(nprobe: int, info: IndexInfo | None) -> int:
    """--knn-nprobe, at most the number of lists of an index."""
    if nprobe < 1:
        raise KnnlmError(f"--knn-nprobe must be 1 or more, not {nprobe}")
    lists = re.search(r"IVF(\d+)", (info.factory if info else None) or "")
    if lists is None or nprobe <= int(lists[1]):
        return nprobe
    if nprobe != NPROBE:  # which nobody asked for
        logger.info(f"--knn-nprobe {nprobe} is above the {lists[1]} lists of the index, so all of them are visited")
    return int(lists[1])
