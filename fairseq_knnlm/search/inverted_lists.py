"""List-major search in an IVF index: each visited list is read once for all queries that visit it."""

from collections.abc import Callable, Iterator

import faiss
import numpy as np
import torch
from torch import Tensor

from ..datastore import Datastore
from ..errors import KnnlmError
from ..index.info import split_transform, stores_exact_keys
from ..index.list_files import SortedLists
from ..parallel import for_each
from .coarse import CoarseQuantizer
from .distances import block_distances, similarity_scale
from .engine import Search
from .far_field import FarField
from .list_blocks import FaissLists, FileLists, KeyDecoder, ListBlock, Lists
from .packed import MOST_IDS
from .target_mass import TargetMass
from .top_k import SAMPLE_STRIDE, NearestCandidates, Thresholds, capacity
from .visits import group_by_list

QUERY_BYTES = 1 << 28  # for the queries that are searched at once
SEARCH_BYTES = 1 << 29  # for candidates, in search
FEW_QUERIES = 32
LONG_SEARCH = 8192  # queries, from which on there is a progress bar
PARALLEL_OVER_LISTS = 1  # FAISS's parallel_mode; by default it takes one thread per query

Consume = Callable[[Tensor, ListBlock, Tensor, Tensor], None]


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
        device: torch.device | str = "cpu",
    ):
        """
        Args:
            lists: the lists as we wrote them; None: as FAISS has opened them
            far: how many more lists of each query take part as Gaussians, in ``target_mass`` and ``visited``
            device: where distances and sums are computed
        """
        self.datastore, self.metric, self.device = datastore, metric, torch.device(device)
        self.preferred_queries = QUERY_BYTES // (4 * datastore.dim)  # more queries share the reading of a list
        self._index = index  # owns the memory that self.ivf points to
        self._transform, ivf = split_transform(index)
        if ivf is None:
            raise KnnlmError(f"an index of type {type(index).__name__} has no inverted lists; use --knn-index auto")
        self.ivf = ivf
        self.nprobe = min(nprobe, self.ivf.nlist)
        self._holds_keys = stores_exact_keys(index, datastore)
        self.lists: Lists = (
            FaissLists(ivf, datastore) if lists is None else FileLists(lists, datastore, self._holds_keys)
        )
        self._means = torch.from_numpy(lists.means).to(self.device) if lists and self._holds_keys else None
        self._decoder = KeyDecoder(datastore.codec, self.device)
        self._coarse = CoarseQuantizer(ivf, metric, self.device)
        self.far = min(far, self.ivf.nlist - self.nprobe)
        self._far_field: FarField | None = None
        if self.far > 0:
            if lists is None or not self._holds_keys:
                raise KnnlmError("--knn-far needs an index that this release built from the keys; use knnlm build")
            self._far_field = FarField(lists, metric)

    # --- every visited entry ----------------------------------------------------------------------------------------

    def target_mass(
        self, queries: np.ndarray, targets: np.ndarray, temperatures: list[float]
    ) -> tuple[np.ndarray, np.ndarray]:
        lists, distances = self._nearest_lists(queries)
        factors = [temperatures[0] / temperature for temperature in temperatures]
        mass = TargetMass(targets, factors, self.device, keep_mean=self._far_field is not None)

        def consume(rows: Tensor, block: ListBlock, similarities: Tensor, constants: Tensor) -> None:
            mass.add(rows, similarities, constants, block.run_values, block.run_ends)

        scale = similarity_scale(self.metric, temperatures[0])
        self._visit(self._vectors(queries), lists[:, : self.nprobe], consume, scale)
        target, total = mass.result()
        if self._far_field is not None:
            far = self._far_field.masses(
                queries, targets, lists, distances, self.nprobe, temperatures, mass.mean_log_mass()
            )
            target, total = np.logaddexp(target, far[0]), np.logaddexp(total, far[1])
        return target, total

    def visited(self, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Everything that one query (1, dim) visits, in any order: distances (1, m), ids (1, m)."""
        if self._holds_keys and isinstance(self.lists, FaissLists):
            self.ivf.nprobe, self.ivf.parallel_mode = self.nprobe, PARALLEL_OVER_LISTS
            largest = float(np.finfo(np.float32).max)
            everything = -largest if self.metric == "ip" else largest
            _, distances, ids = self._index.range_search(np.ascontiguousarray(query, np.float32), everything)
            return distances[None], ids[None]
        numbers = np.unique(self._nearest_lists(query, far=False)[0])
        blocks = list(self.lists.stream(numbers[(numbers >= 0) & (self.lists.sizes[numbers] > 0)]))
        if not blocks:  # every visited list is empty
            return np.empty((1, 0), np.float32), np.empty((1, 0), np.int64)
        found = self._distances_of_one(self._vectors(query), np.concatenate([block.stored for block in blocks]))
        return found.cpu().numpy()[None], np.concatenate([block.ids for block in blocks])[None]

    def values_of(self, ids: np.ndarray) -> np.ndarray:
        return self.datastore.values_of(ids)

    def visited_masses(self, query: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        if self._far_field is None:
            return super().visited_masses(query, temperature)
        lists, distances = self._nearest_lists(query)
        near, scale = lists[0, : self.nprobe], similarity_scale(self.metric, temperature)
        vector, values, masses, totals = self._vectors(query), [], [], []
        for block in self.lists.stream(np.sort(near[(near >= 0) & (self.lists.sizes[near] > 0)])):
            found = self._distances_of_one(vector, block.stored) * scale
            values.append(block.values())
            masses.append(found.cpu().numpy().astype(np.float64))
            totals.append(float(found.double().logsumexp(dim=0)))
        visited = torch.tensor([[float(np.mean(totals)) if totals else 0.0]])
        far_values, far_masses = self._far_field.vocabulary(query, lists, distances, self.nprobe, temperature, visited)
        return np.concatenate([*values, far_values]), np.concatenate([*masses, far_masses])

    def _distances_of_one(self, vector: Tensor, stored: np.ndarray) -> Tensor:
        """Distances of one query (1, dim) and stored keys (m, dim), without cancellation: (m,)."""
        if self.metric == "ip":
            return self._decoder.decode(stored, None) @ vector[0]
        return torch.linalg.vector_norm(self._decoder.decode(stored, vector[0]), dim=1).square_()

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
        most = max(1, SEARCH_BYTES // max(4 * max_samples, 8 * capacity(k)))
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
        sign = -1.0 if self.metric == "ip" else 1.0  # the smaller the better, whatever the metric
        vectors = self._vectors(queries)
        thresholds = Thresholds(len(queries), max_samples, k, self.device)
        self._visit(
            vectors,
            near,
            lambda rows, _, distances, constants: thresholds.add(rows, distances, constants),
            sign,
            every=SAMPLE_STRIDE,
        )
        nearest = NearestCandidates(thresholds.result(), k)
        self._visit(
            vectors,
            near,
            lambda rows, block, distances, constants: nearest.add(rows, distances, constants, block.ids),
            sign,
        )
        start = 0
        for found_distances, found_ids, right in nearest.parts():
            distances, ids = found_distances.mul_(sign).cpu().numpy(), found_ids.cpu().numpy()
            wrong = np.flatnonzero(~right.cpu().numpy())
            if len(wrong):
                distances[wrong], ids[wrong] = self._search_plainly(queries[start + wrong], k)
            start += len(ids)
            yield distances, ids

    # --- visiting lists ---------------------------------------------------------------------------------------------

    def _vectors(self, queries: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(queries, np.float32)).to(self.device)

    def _nearest_lists(self, queries: np.ndarray, far: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """The lists that each query visits, and those of the far field after them; and distances to their centroids.

        (n, dim) -> (n, nprobe + far), -1: none; (n, nprobe + far).
        """
        vectors = torch.from_numpy(self._transform(queries)).to(self.device)
        return self._coarse.nearest(vectors, self.nprobe + (self.far if far else 0))

    def _visit(self, vectors: Tensor, lists: np.ndarray, consume: Consume, scale: float, every: int = 1) -> None:
        """For each visited list: consume(queries (r,) that visit it, the list, distances of its entries).

        The distances are multiplied by ``scale`` and come in two summands, (r, m) and (r,).

        Args:
            every: look at one entry in so many
        """
        visits = group_by_list(lists, self.ivf.nlist)
        numbers = np.array([number for number in visits if self.lists.sizes[number]], np.int64)

        def visit(block: ListBlock) -> None:
            stored = block.stored[::every]
            rows = torch.from_numpy(visits[block.number])
            own = vectors.index_select(0, rows.to(self.device))
            if self.metric == "ip":
                keys = self._decoder.decode(stored, None)
            else:
                origin = self._origin(block)
                keys = self._decoder.decode(stored, origin)
                own -= origin
            consume(rows, block, *block_distances(own, keys, self.metric, scale))

        name = "searching" if len(vectors) >= LONG_SEARCH else None
        self._run(visit, ((block,) for block in self.lists.stream(numbers)), name, len(numbers))

    def _origin(self, block: ListBlock) -> Tensor:
        """A point near the keys of a list, (dim,)."""
        return self._decoder.decode(block.stored[:1], None)[0] if self._means is None else self._means[block.number]

    def _run(self, function: Callable[..., None], jobs: object, name: str | None, total: int | None = None) -> None:
        """Do all jobs: on a CPU one per thread, on another device one after the other."""
        if self.device.type == "cpu":
            for_each(function, jobs, name, total)  # type: ignore[arg-type]
        else:
            for job in jobs:  # type: ignore[attr-defined]
                function(*job)
