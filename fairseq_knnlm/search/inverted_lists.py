"""List-major search in an IVF index: each visited list is read once for all queries that visit it."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import faiss
import numpy as np
import torch
from torch import Tensor

from ..datastore import Datastore
from ..errors import KnnlmError
from ..index.info import split_transform, stores_exact_keys
from ..index.list_files import SortedLists
from ..parallel import one_thread_per_operation
from .coarse import CoarseQuantizer
from .distances import similarity_scale
from .early import EARLY_NAMES, ChosenLists, ListEstimates, VisitRule
from .engine import Search
from .far_field import FarField
from .list_blocks import FaissLists, FileLists, Lists, ResidentLists
from .list_visitor import ListVisitor
from .masses import Masses, join_masses
from .one_query import OneQueryScan
from .packed import MOST_IDS
from .top_k import SAMPLE_STRIDE, capacity
from .visitor import Found, Visitor, list_ranges

QUERY_BYTES = 1 << 28  # for the queries that are searched at once
SEARCH_BYTES = 1 << 29  # for candidates, in search
FEW_QUERIES = 32
PARALLEL_OVER_LISTS = 1  # FAISS's parallel_mode; by default it takes one thread per query

Device = torch.device | str
Result = TypeVar("Result")


class ListSearch(Search):
    """Exact distances to the entries of the visited lists: the k nearest, or all of them."""

    def __init__(
        self,
        index: faiss.Index,
        datastore: Datastore,
        metric: str,
        nprobe: int,
        lists: SortedLists | None = None,
        far: int = 0,
        devices: Sequence[Device] = ("cpu",),
        resident: bool = False,
        precision: torch.dtype = torch.float32,
        rule: VisitRule | None = None,
    ):
        """
        Args:
            lists: the lists as we wrote them; None: as FAISS has opened them
            far: how many more lists of each query take part as Gaussians, in ``target_mass`` and ``visited_masses``
            devices: where distances and sums are computed; with several, each has a range of the lists
            resident: keep the lists in the memory of the devices, instead of reading them for every search
            precision: of the factors of distances, see ``block_distances``
            rule: which of the nearest lists are not worth a visit, and are in the far field; None: all are visited
        """
        self.datastore, self.metric = datastore, metric
        self.preferred_queries = QUERY_BYTES // (4 * datastore.dim)  # more queries share the reading of a list
        self._index = index  # owns the memory that self.ivf points to
        self._transform, ivf = split_transform(index)
        if ivf is None:
            raise KnnlmError(f"an index of type {type(index).__name__} has no inverted lists; use --knn-index auto")
        self.ivf = ivf
        self.nprobe = min(nprobe, self.ivf.nlist)
        self.holds_keys = stores_exact_keys(index, datastore)
        self.visitors = self._make_visitors(lists, [torch.device(d) for d in devices], resident, precision)
        self.lists = self.visitors[0].lists
        self._coarse = CoarseQuantizer(ivf, metric, self.visitors[0].device)
        self.far = min(far, self.ivf.nlist - self.nprobe)
        self._far_field: FarField | None = None
        self._estimates: ListEstimates | None = None
        self._rule = rule
        if lists is not None and self.holds_keys:
            self._estimates, self.early_names, self.early_lists = ListEstimates(lists, metric), EARLY_NAMES, self.nprobe
        elif self.far > 0 or rule is not None:
            name = "--knn-far" if self.far > 0 else "--knn-gate-skip"
            raise KnnlmError(f"{name} needs an index that this release built from the keys; use knnlm build")
        if (self.far > 0 or rule is not None) and lists is not None and self._estimates is not None:
            self._far_field = FarField(lists, self._estimates)

    def _make_visitors(
        self, lists: SortedLists | None, devices: list[torch.device], resident: bool, precision: torch.dtype
    ) -> Sequence[Visitor]:
        if lists is None:
            if len(devices) > 1:
                raise KnnlmError("several devices need an index that this release built; use knnlm build")
            faiss_lists = FaissLists(self.ivf, self.datastore)
            return [ListVisitor(faiss_lists, self.datastore, self.metric, devices[0], precision=precision)]
        means = lists.means if self.holds_keys else None
        visitors = []
        for device, own in zip(devices, list_ranges(lists, len(devices))):
            files, scan = FileLists(lists, self.datastore, self.holds_keys), None
            source: Lists = files
            if resident and self.holds_keys:
                source = ResidentLists(files, device, *own)
            elif self.holds_keys and [d.type for d in devices] == ["cpu"]:  # FAISS's index serves one at a time
                scan = OneQueryScan(self._index, files, self.metric)
            visitors.append(ListVisitor(source, self.datastore, self.metric, device, means, precision, own, scan))
        return visitors

    def _ask(self, question: Callable[[Visitor], Result]) -> list[Result]:
        """The answers of all visitors, who work at the same time."""
        if len(self.visitors) == 1:
            return [question(self.visitors[0])]
        with ThreadPoolExecutor(len(self.visitors)) as pool:
            return list(pool.map(question, self.visitors))

    # --- every visited entry ----------------------------------------------------------------------------------------

    def masses(
        self,
        queries: np.ndarray,
        targets: np.ndarray,
        temperatures: list[float],
        early: bool = False,
        keep: bool = False,
    ) -> Masses:
        chosen, keep_mean = self._chosen_lists(queries, early), self._far_field is not None
        keep = keep and self.early_lists is not None
        near = chosen.lists[:, : self.nprobe]
        mass = join_masses(
            self._ask(lambda own: own.masses(_vectors(queries, own), targets, near, temperatures, keep_mean, keep))
        )
        mass.early, mass.expected = chosen.early, chosen.expected
        if self._far_field is not None:
            far = self._far_field.masses(
                queries, targets, chosen.lists, chosen.distances, self.nprobe, temperatures,
                torch.from_numpy(mass.mean_log_mass()),
            )  # fmt: skip
            mass.target, mass.total = np.logaddexp(mass.target, far[0]), np.logaddexp(mass.total, far[1])
        return mass

    def visited(self, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Everything that one query (1, dim) visits, in any order: distances (1, m), ids (1, m)."""
        if self.holds_keys and isinstance(self.lists, FaissLists):
            self.ivf.nprobe, self.ivf.parallel_mode = self.nprobe, PARALLEL_OVER_LISTS
            largest = float(np.finfo(np.float32).max)
            everything = -largest if self.metric == "ip" else largest
            _, distances, ids = self._index.range_search(np.ascontiguousarray(query, np.float32), everything)
            return distances[None], ids[None]
        near = self._chosen_lists(query).lists[:, : self.nprobe]
        distances, ids = zip(*self._ask(lambda own: own.visited(_vectors(query, own), near)))
        return np.concatenate(distances)[None], np.concatenate(ids)[None]

    def values_of(self, ids: np.ndarray) -> np.ndarray:
        return self.datastore.values_of(ids)

    def log_weights_of(self, ids: np.ndarray) -> np.ndarray | None:
        return self.datastore.log_weights_of(ids)

    def visited_masses(self, query: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(self.lists, FaissLists):
            return super().visited_masses(query, temperature)
        with one_thread_per_operation:  # one query is some twenty short operations
            return self._visited_masses(query, temperature)

    def _visited_masses(self, query: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        chosen, scale = self._chosen_lists(query), similarity_scale(self.metric, temperature)
        near = chosen.lists[:, : self.nprobe]
        found = self._ask(lambda own: own.visited_masses(_vectors(query, own), near, scale))
        values, masses = [part[0] for part in found], [part[1] for part in found]
        if self._far_field is not None:
            totals = np.concatenate([part[2] for part in found])
            mean = torch.tensor([[float(totals.mean()) if len(totals) else 0.0]])
            far = self._far_field.vocabulary(query, chosen.lists, chosen.distances, self.nprobe, temperature, mean)
            values.append(far[0])
            masses.append(far[1])
        return np.concatenate(values), np.concatenate(masses)

    # --- the k nearest ----------------------------------------------------------------------------------------------

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest of all entries of the visited lists. Needs an index that stores the keys themselves."""
        distances, ids = zip(*self.search_in_parts(queries, k))
        return np.concatenate(distances), np.concatenate(ids)

    def search_in_parts(self, queries: np.ndarray, k: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        k = min(k, len(self.datastore))
        if len(queries) < FEW_QUERIES or len(self.datastore) > MOST_IDS:  # nothing to share, or no room for the ids
            yield self._search_plainly(queries, k)
            return
        near, _ = self._nearest_lists(queries, far=False)
        sampled = -(-np.append(self.lists.sizes, 0) // SAMPLE_STRIDE)  # the last is for list -1, which means none
        max_samples = int(sampled[near].sum(axis=1).max())
        most = max(1, self.search_bytes // max(4 * max_samples, 8 * capacity(k)))
        passes = -(-len(queries) // most)
        step = -(-len(queries) // passes)  # evenly, since a small pass reads as much as a large one
        for start in range(0, len(queries), step):
            rows = slice(start, start + step)
            yield from self._search(queries[rows], near[rows], max_samples, k)

    def _search_plainly(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        self.ivf.nprobe, self.ivf.parallel_mode = self.nprobe, PARALLEL_OVER_LISTS
        return self._index.search(np.ascontiguousarray(queries, np.float32), k)

    def _search(
        self, queries: np.ndarray, near: np.ndarray, max_samples: int, k: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """queries (n, dim), the lists that each visits (n, nprobe) -> distances (rows, k), ids (rows, k)."""
        found = self._ask(lambda own: own.nearest(_vectors(queries, own), near, k, max_samples))
        start = 0
        for parts in zip(*found):  # of the same rows
            distances, ids, right = self._nearest_of_all(list(parts), k)
            wrong = np.flatnonzero(~right)
            if len(wrong):
                distances[wrong], ids[wrong] = self._search_plainly(queries[start + wrong], k)
            start += len(ids)
            yield distances, ids

    def _nearest_of_all(self, parts: list[Found], k: int) -> Found:
        """The k nearest of what several visitors have found for the same queries."""
        if len(parts) == 1:
            return parts[0]
        distances = np.concatenate([part[0] for part in parts], axis=1)
        ids = np.concatenate([part[1] for part in parts], axis=1)
        right = np.logical_and.reduce([part[2] for part in parts])
        sign = -1.0 if self.metric == "ip" else 1.0
        best = np.argsort(np.where(ids < 0, np.inf, sign * distances), axis=1, kind="stable")[:, :k]
        return np.take_along_axis(distances, best, axis=1), np.take_along_axis(ids, best, axis=1), right

    # --- lists ------------------------------------------------------------------------------------------------------

    @property
    def search_bytes(self) -> int:
        """For candidates, in search."""
        return SEARCH_BYTES

    def _nearest_lists(self, queries: np.ndarray, far: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """The lists that each query visits, and those of the far field after them; and distances to their centroids.

        (n, dim) -> (n, nprobe + far), -1: none; (n, nprobe + far).
        """
        vectors = torch.from_numpy(self._transform(queries)).to(self.visitors[0].device)
        return self._coarse.nearest(vectors, self.nprobe + (self.far if far else 0))

    def _chosen_lists(self, queries: np.ndarray, early: bool = False) -> ChosenLists:
        """As ``_nearest_lists``, without those that the rule leaves out, which go to the far field.

        Args:
            early: also tell what is known before any list is read
        """
        lists, distances = self._nearest_lists(queries)
        if self._estimates is None or not (early or self._rule):
            return ChosenLists(lists, distances)
        near, apart = lists[:, : self.nprobe], distances[:, : self.nprobe]
        expected, known = self._estimates.early(queries, near, apart)
        if self._rule is not None:
            visited = self._rule.visited(expected, known)
            kept, skipped = np.where(visited, near, -1), np.where(visited, -1, near)
            lists = np.concatenate([kept, skipped, lists[:, self.nprobe :]], axis=1)
            distances = np.concatenate([apart, apart, distances[:, self.nprobe :]], axis=1)
        return ChosenLists(lists, distances, expected, known)


def _vectors(queries: np.ndarray, visitor: Visitor) -> Tensor:
    """Queries (n, dim) on the device of a visitor."""
    return torch.from_numpy(np.ascontiguousarray(queries, np.float32)).to(visitor.device)
