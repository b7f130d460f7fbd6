"""What is known of a query before any list is read: how near its lists are, and how much of its mass each may hold.

The keys of a list are taken as normally distributed around its centroid c, with a variance v in every dimension, which
is the spread of this list. Then the expected mass of a list of n entries at temperature T is, for squared L2 distances,

    n (1 + 2 v / T)^(-dim / 2) exp(-|q - c|^2 / (T + 2 v))

and for inner products n exp(q.c / T + |q|^2 v / 2 T^2). The L2 distances to the centroids are known from choosing the
lists to visit, so these estimates cost next to nothing.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..index.list_files import SortedLists

LEAST_SHARE = -15.0  # log of a share of the mass that is as good as none
EARLY_NAMES = ("centroid", "expected mass", "concentration", "mixed values")


class ListEstimates:
    """Estimates of the mass of lists, from what stands beside an index."""

    def __init__(self, lists: SortedLists, metric: str):
        self._lists, self._metric, self._dim = lists, metric, lists.info.dim
        self.sizes = np.diff(lists.file.starts)
        # How much each list counts: its entries, or the sum of their weights.
        self.counts = self.sizes if lists.weights is None else _sums(lists.weights, lists.file.starts)
        with np.errstate(divide="ignore"):
            self._log_sizes = torch.from_numpy(np.log(self.counts)).float()  # -inf: an empty list has no mass
        self._variances = torch.from_numpy(lists.spreads) / self._dim
        self._gaussians: dict[float, tuple[Tensor, Tensor]] = {}
        self._means = torch.from_numpy(lists.means) if metric == "ip" else torch.empty(0)
        # One temperature for all that is said early, whatever a run's own is: what was learnt from it stays right.
        self.temperature = lists.info.temperature or float(lists.spreads.mean()) or 1.0

    @cached_property
    def _entropies(self) -> Tensor:
        """Of the values of each list, in nats: (lists,); 0 for an empty one."""
        counts = (self._lists.run_counts_of(number) for number in range(len(self.sizes)))
        sums = np.array([own @ np.log(own) for own in counts])
        filled = np.where(self.sizes > 0, self.counts, 1)
        return torch.from_numpy(np.log(filled) - sums / filled).float()

    def log_mass(self, queries: Tensor, lists: np.ndarray, distances: np.ndarray, temperature: float) -> Tensor:
        """The estimated log mass of lists (n, m), -1 for none, whose centroids are so far away (n, m) -> (n, m)."""
        numbers, near = torch.from_numpy(lists), torch.from_numpy(distances)
        if self._metric == "l2":
            heights, widths = self._gaussian(temperature)
            return torch.addcdiv(heights[numbers], near, widths[numbers], value=-1)
        log_mass, numbers = self._log_sizes[numbers].masked_fill(numbers < 0, -torch.inf), numbers.clamp(min=0)
        # The centroids of inner products have unit length, wherever the keys are: so with the means.
        products = torch.bmm(self._means[numbers], queries[:, :, None])[:, :, 0]
        squares = queries.square().sum(dim=1, keepdim=True)
        return log_mass + products / temperature + squares * self._variances[numbers] / (2 * temperature * temperature)

    def _gaussian(self, temperature: float) -> tuple[Tensor, Tensor]:
        """What the estimate for L2 has of each list: its log mass at the centroid, and T + 2 v; (lists + 1,) each.

        The last is for list -1, which means none.
        """
        if temperature not in self._gaussians:
            widths = F.pad(temperature + 2 * self._variances, (0, 1), value=1.0)
            heights = F.pad(self._log_sizes, (0, 1), value=-torch.inf) - 0.5 * self._dim * (widths / temperature).log()
            self._gaussians[temperature] = heights, widths
        return self._gaussians[temperature]

    def early(self, queries: np.ndarray, lists: np.ndarray, distances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log of the share of a query's mass that each of its lists may hold, and what a gate may look at.

        queries (n, dim), lists (n, nprobe), distances (n, nprobe) -> (n, nprobe), -inf for none; (n, EARLY_NAMES).
        """
        vectors = torch.from_numpy(np.ascontiguousarray(queries, np.float32))
        log_mass = self.log_mass(vectors, lists, distances, self.temperature)
        total = log_mass.logsumexp(dim=1)
        log_shares = (log_mass - total[:, None]).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        shares = log_shares.exp()
        nearest = torch.from_numpy(distances[:, 0]) * (1.0 if self._metric == "ip" else -1.0)
        concentration = shares.square().sum(dim=1)  # 1: all mass is expected in one list
        mixed = (shares * self._entropies[torch.from_numpy(np.maximum(lists, 0))]).sum(dim=1)
        return log_shares.numpy(), torch.stack([nearest, total, concentration, mixed], dim=1).numpy()


def _sums(weights: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Of consecutive parts: weights (entries,), the first of each part and the end (parts + 1,) -> (parts,) double."""
    sums, filled = np.zeros(len(starts) - 1), np.flatnonzero(np.diff(starts))
    if len(filled):  # not by cumulated sums, whose differences lose digits
        sums[filled] = np.add.reduceat(weights, starts[filled], dtype=np.float64)
    return sums


@dataclass
class ChosenLists:
    """The nearest lists of n queries: first those that are visited, then those of the far field."""

    lists: np.ndarray  # (n, m), -1 for none
    distances: np.ndarray  # (n, m) to their centroids
    expected: np.ndarray | None = None  # (n, nprobe) log of the share of the mass that each was expected to hold
    early: np.ndarray | None = None  # (n, EARLY_NAMES)


@dataclass
class VisitRule:
    """Which of a query's nearest lists are visited: those that are worth it, as far as that is known early."""

    least: float  # that a visit must be worth
    rank: float = 0.0  # weight of the log of a list's rank, from 1
    share: float = 1.0  # weight of the log of the share of the mass that a list is expected to hold
    early: list[float] = field(default_factory=list)  # weights of EARLY_NAMES: how much a query gains by a visit
    centre: list[float] = field(default_factory=list)  # what is subtracted from what is known early

    def visited(self, log_shares: np.ndarray, early: np.ndarray) -> np.ndarray:
        """(n, nprobe), (n, EARLY_NAMES) -> (n, nprobe) bool."""
        return self.worth(log_shares, early) >= self.least

    def worth(self, log_shares: np.ndarray, early: np.ndarray) -> np.ndarray:
        """What a visit is worth, on the scale of ``least``: (n, nprobe)."""
        worth = self.rank * np.log(1 + np.arange(log_shares.shape[1])) + self.share * clip_shares(log_shares)
        return worth + ((early - self.centre) @ np.array(self.early))[:, None] if self.early else worth


def clip_shares(log_shares: np.ndarray) -> np.ndarray:
    """In double precision, and not below what makes a difference."""
    return np.maximum(log_shares.astype(np.float64), LEAST_SHARE)
