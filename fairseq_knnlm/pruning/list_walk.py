"""A walk through the inverted lists of a datastore: near entries are in one list, so a list is all that is looked at.

All distances within a list of some 640 entries are one small matrix product, so the whole datastore is as many products
as there are lists, instead of a search for every entry.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..datastore import Datastore
from ..errors import KnnlmError
from ..index import IndexInfo, build_index, build_index_if_missing, open_index, plan_index
from ..index.info import extract_ivf, stores_exact_keys
from ..index.kmeans import kmeans, nearest_centroids
from ..index.list_files import open_lists
from ..index.plan import ENTRIES_PER_LIST, KEY_CODES
from ..parallel import for_each
from ..progress import human_seconds
from ..search.coarse import CoarseQuantizer
from ..search.list_blocks import FileLists, KeyDecoder, ListBlock
from ..search.own_text import query_vectors
from ..search.target_mass import runs
from ..search.visits import stable_order

logger = logging.getLogger(__name__)

MOST_ENTRIES = 1024  # that are compared with each other at once; of a longer run of one value, parts are
TIMED_LISTS = 6  # to say how long all will take
QUERIES_AT_ONCE = 1 << 16


@dataclass
class ListEntries:
    """The entries of one list, in the order of their values; or of several near lists, as if they were one."""

    number: int  # of the list, or of the first one
    ids: np.ndarray  # (m,)
    keys: Tensor  # (m, dim) float32, relative to a point near them
    values: np.ndarray  # (m,) ascending
    run_ends: np.ndarray  # (runs,) where each value's entries end
    weights: np.ndarray  # (m,) float32: what each entry counts
    origin: Tensor  # (dim,) the point


class ListWalk:
    """Reads every list of an index once."""

    def __init__(self, datastore: Datastore, spec: str | None = None):
        """spec: the index whose lists are walked through; built if it is missing"""
        self.datastore = datastore
        self.info = _index_with_lists(datastore, spec)
        self._index = open_index(datastore, self.info, warm=False)  # owns what self._ivf points to
        lists, ivf = open_lists(datastore, self.info), None if self._index is None else extract_ivf(self._index)
        if lists is None or self._index is None or ivf is None or not stores_exact_keys(self._index, datastore):
            raise KnnlmError(
                f"the index {self.info.name} of {datastore.folder} has no inverted lists that hold the keys; leave "
                "--index out, or give one such as auto"
            )
        self._ivf = ivf
        self._lists = FileLists(lists, datastore, holds_keys=True)
        self._decoder, self._means = KeyDecoder(datastore.codec, torch.device("cpu")), torch.from_numpy(lists.means)
        self._spread = float(lists.spreads.mean())

    @property
    def sizes(self) -> np.ndarray:
        """Entries of each list, (lists,)."""
        return self._lists.sizes

    @property
    def temperature(self) -> float:
        """At which neighbours are spread as at a good one, as far as the index knows."""
        return self.info.temperature or self._spread or 1.0

    def each(self, function: Callable[[ListEntries], None], name: str, lists_at_once: int = 1) -> None:
        """function(entries) for every list that is not empty, or for every group of so many near ones, in threads."""
        numbers = np.flatnonzero(self.sizes)
        if lists_at_once == 1:
            groups = list(numbers[:, None])
            jobs = ((self._entries(block),) for block in self._lists.stream(numbers))
        else:
            groups = self.near_lists(lists_at_once)
            jobs = ((self._joined(group),) for group in groups)
        self._say_how_long(function, groups)
        for_each(function, jobs, name, len(groups))

    def near_lists(self, count: int) -> list[np.ndarray]:
        """All lists that are not empty, in groups of about so many whose means are near each other."""
        numbers = np.flatnonzero(self.sizes)
        means = self._means[numbers].contiguous()
        centres = kmeans(means, max(1, len(numbers) // count), "l2", seed=1)
        nearest = nearest_centroids(means, centres, "l2")[:, 0].numpy()
        return [numbers[nearest == group] for group in np.unique(nearest)]

    def _say_how_long(self, function: Callable[[ListEntries], None], groups: list[np.ndarray]) -> None:
        """Try some lists, or groups of them, of all sizes, and say how long all of them will take."""
        if len(groups) <= 4 * TIMED_LISTS:
            return
        sizes = np.array([self.sizes[group].sum() for group in groups])
        some = np.argsort(sizes, kind="stable")[np.linspace(0, len(groups) - 1, TIMED_LISTS + 1).astype(int)[1:]]
        started = time.perf_counter()
        for number in some.tolist():
            function(self._joined(groups[number]))
        seconds = time.perf_counter() - started
        # The work of a list goes with the square of its size, until it is cut into parts.
        work = np.minimum(sizes, MOST_ENTRIES) * sizes.astype(float)
        logger.info(
            f"{len(self.datastore):,} entries in {len(self.sizes):,} lists, {self.sizes.max():,} in the largest: about "
            f"{human_seconds(seconds * work.sum() / work[some].sum() / torch.get_num_threads())}"
        )

    def _joined(self, group: np.ndarray) -> ListEntries:
        """The entries of some lists (n,), in the order of their values, then of the lists."""
        lists = [self._entries(block) for block in self._lists.stream(group)]
        if len(lists) == 1:
            return lists[0]
        values = np.concatenate([own.values for own in lists])
        order, origin = values.argsort(kind="stable"), lists[0].origin
        keys = torch.cat([own.keys + (own.origin - origin) for own in lists])[torch.from_numpy(order)]
        ids, weights = (np.concatenate([getattr(own, name) for own in lists])[order] for name in ("ids", "weights"))
        return ListEntries(lists[0].number, ids, keys, values[order], runs(values[order])[1], weights, origin)

    def _entries(self, block: ListBlock) -> ListEntries:
        origin = self._means[block.number]
        weights = np.ones(len(block.ids), np.float32) if block.weights is None else block.weights.numpy()
        keys = self._decoder.decode(block.stored, origin)
        return ListEntries(block.number, block.ids, keys, block.values(), block.run_ends, weights, origin)

    def find_lists(self, queries: Datastore) -> np.ndarray:
        """The list that each entry of another datastore is nearest to, (queries,)."""
        coarse, found = CoarseQuantizer(self._ivf, self.info.metric, torch.device("cpu")), []
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            rows = np.arange(start, min(start + QUERIES_AT_ONCE, len(queries)))
            vectors = torch.from_numpy(np.ascontiguousarray(query_vectors(self.datastore, queries, rows)))
            found.append(coarse.nearest(vectors, 1)[0][:, 0])
        return np.concatenate(found)


def _index_with_lists(datastore: Datastore, spec: str | None) -> IndexInfo:
    if spec is not None:
        return build_index_if_missing(datastore, spec, "l2")
    dtype = datastore.manifest.key_dtype
    if plan_index("auto", len(datastore), datastore.dim, dtype, "l2").factory is not None:
        return build_index(datastore, "auto", "l2")
    lists = max(1, len(datastore) // ENTRIES_PER_LIST)  # a small datastore is searched without any
    return build_index(datastore, f"IVF{lists},{KEY_CODES[dtype]}", "l2")


class QueryRows:
    """Whose neighbours are looked at: entries of another datastore, by the list that each is nearest to."""

    def __init__(self, walk: ListWalk, queries: Datastore, positions: np.ndarray | None):
        """positions: (queries,) where they stand in the datastore's text; None: nowhere"""
        self._queries, self._datastore, self._positions = queries, walk.datastore, positions
        lists = walk.find_lists(queries)
        self._order = stable_order(lists)
        self._ends = np.bincount(lists, minlength=len(walk.sizes)).cumsum()
        self.count = len(queries)

    def of(self, entries: ListEntries) -> tuple[np.ndarray, Tensor]:
        """Numbers (r,) of the queries of a list, and their keys (r, dim), relative to the list's point."""
        first = int(self._ends[entries.number - 1]) if entries.number else 0
        rows = np.sort(self._order[first : int(self._ends[entries.number])])
        vectors = query_vectors(self._datastore, self._queries, rows)
        return rows, torch.from_numpy(np.ascontiguousarray(vectors, np.float32)) - entries.origin

    def values(self, rows: np.ndarray) -> np.ndarray:
        return self._queries.values[rows]

    def positions(self, rows: np.ndarray) -> np.ndarray:
        return rows if self._positions is None else self._positions[rows]


def square_distances(one: Tensor, other: Tensor) -> Tensor:
    """Squared L2 distances: (r, dim), (m, dim) -> (r, m)."""
    norms = one.square().sum(dim=1, keepdim=True) + other.square().sum(dim=1)
    return torch.addmm(norms, one, other.T, alpha=-2.0).clamp_(min=0)


def parts_of_runs(
    run_ends: np.ndarray, most: int = MOST_ENTRIES, together: int | None = None
) -> Iterator[tuple[int, int, int, int]]:
    """Cut the entries of a list into parts of whole runs, at most so many each, and long runs into pieces.

    Args:
        together: at most so many entries if a part has several runs; None: no fewer than of one run

    Example with at most 5 entries and runs that end at 2, 4, 13: (0, 4, 0, 1) holds two whole runs, then come the two
    pieces of the third, as even as they can be: (4, 8, 0, 2) and (8, 13, 1, 2).

    Yields:
        the first entry, the one after the last, which piece of a run it is, and of how many
    """
    first = begin = 0
    for end in run_ends.tolist():
        if end - begin > most:
            if begin > first:
                yield first, begin, 0, 1
            pieces = -(-(end - begin) // most)
            edges = np.linspace(begin, end, pieces + 1).astype(int).tolist()
            for piece in range(pieces):
                yield edges[piece], edges[piece + 1], piece, pieces
            first = end
        elif begin > first and end - first > (together or most):
            yield first, begin, 0, 1
            first = begin
        begin = end
    if begin > first:
        yield first, begin, 0, 1
