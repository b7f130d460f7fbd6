"""Exact search: every key is read and compared. For small stores, for checking, and for Xu et al.'s real mask."""

import faiss
import numpy as np
import torch
from faiss.contrib.exhaustive_search import knn_ground_truth

from ..datastore import Datastore
from ..probs import similarity_scale
from .blocks import block_distances
from .mass import TargetMass


class ExactSearch:
    """Streams the datastore past all queries; memory does not grow with the datastore."""

    preferred_queries = 32768  # each pass reads every key, so many queries should share it

    def __init__(self, datastore: Datastore, metric: str):
        self.datastore, self.metric = datastore, metric

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        metric = faiss.METRIC_INNER_PRODUCT if self.metric == "ip" else faiss.METRIC_L2
        blocks = (np.ascontiguousarray(block, np.float32) for block in self.datastore.key_blocks())
        k = min(k, len(self.datastore))
        return knn_ground_truth(np.ascontiguousarray(queries, np.float32), blocks, k, metric)

    def target_mass(self, queries: np.ndarray, targets: np.ndarray, temperature: float):
        mass, scale = TargetMass(targets), similarity_scale(self.metric, temperature)
        all_queries = torch.from_numpy(np.ascontiguousarray(queries, np.float32))
        start = 0
        for block in self.datastore.key_blocks(rows=1 << 13):
            keys = torch.from_numpy(np.array(block, np.float32))
            values = self.datastore.values[start : start + len(block)]
            start += len(block)
            for rows in torch.arange(len(queries)).split(1 << 12):
                distances = block_distances(all_queries[rows], keys, self.metric, keys.mean(dim=0), scale)
                mass.add(rows, *distances, values)
        return mass.result()
