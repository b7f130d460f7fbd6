"""The coarse quantizer: which lists are nearest to a query."""

import faiss
import numpy as np
import torch
from torch import Tensor

from ..index.info import has_flat_quantizer, quantizer_ivf
from ..index.kmeans import GroupedCentroids, best_centroids

GROUPS = 8  # of centroids that are looked at, where centroids are in groups; more where very many lists are wanted
LISTS_WANTED_OF_GROUPS = 0.25  # at most, of the lists in the groups that are looked at


class CoarseQuantizer:
    """Finds lists by matrix products; a quantizer of another kind (a graph, say) is asked itself."""

    def __init__(self, ivf: faiss.IndexIVF, metric: str, device: torch.device):
        self._ivf, self._metric = ivf, metric
        self._centroids: Tensor | None = None
        self._grouped: GroupedCentroids | None = None
        groups = quantizer_ivf(ivf)
        if groups is not None:
            centres = torch.from_numpy(groups.quantizer.reconstruct_n(0, groups.nlist)).to(device)
            centroids = torch.from_numpy(ivf.quantizer.reconstruct_n(0, ivf.nlist)).to(device)
            self._grouped = GroupedCentroids(centres, centroids, metric)
            self._lists_per_group = ivf.nlist / groups.nlist
        elif has_flat_quantizer(ivf):
            self._centroids = torch.from_numpy(ivf.quantizer.reconstruct_n(0, ivf.nlist)).to(device)

    def nearest(self, queries: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The ``count`` nearest lists of each query, best first, and squared distances or inner products.

        (n, dim) -> (n, count), -1 where there are fewer; (n, count) float32.
        """
        count = min(count, self._ivf.nlist)
        if self._grouped is not None:
            wanted = count / (LISTS_WANTED_OF_GROUPS * self._lists_per_group)
            numbers, scores = self._grouped.best(queries, max(GROUPS, round(wanted)), count)
        elif self._centroids is not None:
            numbers, scores = best_centroids(queries, self._centroids, self._metric, count)
        else:
            distances, lists = self._ivf.quantizer.search(queries.cpu().numpy(), count)
            return lists, distances
        if self._metric == "l2":  # the scores lack what all lists of a query have in common
            scores = (queries.square().sum(dim=1, keepdim=True) - 2 * scores).clamp_(min=0)
        return numbers.cpu().numpy(), scores.cpu().numpy()
