"""Exact search: every key is read and compared. For small stores, for checking, and for Xu et al.'s real mask."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..datastore import Datastore
from ..parallel import for_each
from .distances import block_distances, neighbor_distances, similarity_scale
from .engine import Search
from .masses import Masses
from .target_mass import TargetMass, runs
from .top_k import RunningNearest

KEYS_PER_BLOCK = 2048
QUERIES_PER_BLOCK = 1024


class ExactSearch(Search):
    """Streams the datastore past all queries; memory does not grow with the datastore."""

    preferred_queries = 32768  # each pass reads every key, so many queries should share it

    def __init__(self, datastore: Datastore, metric: str):
        self.datastore, self.metric = datastore, metric

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        sign = -1.0 if self.metric == "ip" else 1.0  # the smaller the better, whatever the metric
        k = min(k, len(self.datastore))
        # A matrix product rounds at the magnitude of the norms, not of the distance. So some more than k are kept, and
        # the distances that decide are computed one by one.
        kept = k if self.metric == "ip" else min(len(self.datastore), k + k // 16 + 16)
        nearest = [RunningNearest(len(rows), kept, KEYS_PER_BLOCK) for rows in self._parts(queries)]

        def consume(part: int, _: Tensor, first: int, distances: Tensor, constants: Tensor) -> None:
            nearest[part].add(distances, constants, first)

        self._visit(queries, consume, sign)
        results = [part.result() for part in nearest]
        distances = torch.cat([found for found, _ in results]).mul_(sign).numpy()
        ids = torch.cat([found for _, found in results]).numpy()
        if self.metric == "ip":
            return distances, ids
        distances = neighbor_distances(queries, ids, self.datastore.gather_keys, self.metric)
        order = np.argsort(distances, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(distances, order, axis=1), np.take_along_axis(ids, order, axis=1)

    def values_of(self, ids: np.ndarray) -> np.ndarray:
        return self.datastore.values_of(ids)

    def log_weights_of(self, ids: np.ndarray) -> np.ndarray | None:
        return self.datastore.log_weights_of(ids)

    def visited(self, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Every entry, for one query (1, dim): distances (1, entries), ids (1, entries)."""
        return self.search(query, len(self.datastore))

    def masses(
        self,
        queries: np.ndarray,
        targets: np.ndarray,
        temperatures: list[float],
        early: bool = False,
        keep: bool = False,
    ) -> Masses:
        mass = TargetMass(targets, [temperatures[0] / temperature for temperature in temperatures])
        values, weights = self.datastore.values, self.datastore.weights

        def consume(_: int, rows: Tensor, first: int, similarities: Tensor, constants: Tensor) -> None:
            block, own = slice(first, first + similarities.size(1)), None
            if weights is not None:
                own = torch.from_numpy(weights[block][values[block].argsort()])
            mass.add(rows, similarities, constants, *runs(np.sort(values[block])), weights=own)

        self._visit(
            queries,
            consume,
            similarity_scale(self.metric, temperatures[0]),
            arrange=lambda first, count: values[first : first + count].argsort(),
        )
        return mass.result()

    @staticmethod
    def _parts(queries: np.ndarray) -> tuple[Tensor, ...]:
        """Some queries for one thread at a time, so that all threads have some."""
        share = -(-len(queries) // torch.get_num_threads())
        return torch.arange(len(queries)).split(max(1, min(share, QUERIES_PER_BLOCK)))

    def _visit(
        self,
        queries: np.ndarray,
        consume: Callable[..., None],
        scale: float,
        arrange: Callable[[int, int], np.ndarray | slice] = lambda first, count: slice(None),
    ) -> None:
        """For each block of keys and each part of the queries, in parallel over the parts:

        consume(number of the part, its queries (r,), first entry, distances (r, m) and (r,) as block_distances gives)

        Args:
            arrange: (first entry, how many) of a block -> their order in the distances
        """
        all_queries = torch.from_numpy(np.ascontiguousarray(queries, np.float32))
        parts = list(enumerate(self._parts(queries)))
        first = 0
        for block in self.datastore.key_blocks(rows=KEYS_PER_BLOCK):
            keys = torch.from_numpy(np.array(block, np.float32)[arrange(first, len(block))])
            origin = keys.mean(dim=0) if self.metric == "l2" else torch.zeros(self.datastore.dim)
            keys -= origin

            def visit(
                part: int, rows: Tensor, keys: Tensor = keys, origin: Tensor = origin, first: int = first
            ) -> None:
                consume(part, rows, first, *block_distances(all_queries[rows] - origin, keys, self.metric, scale))

            for_each(visit, parts)
            first += len(block)
