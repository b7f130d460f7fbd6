"""What a head is trained for: log p of the tokens, a mixture with the LM, or imitating neighbours."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..data.neighbor_table import NeighborTable
from ..search.distances import similarity_scale


class NeighborShares:
    """p_kNN of training tokens, from a table of their neighbours: the softmax of -d/T over those that it holds."""

    def __init__(self, table: NeighborTable, temperature: float):
        self._table = table
        self._scale = similarity_scale(table.facts.search.get("metric", "l2"), temperature)

    def of(self, entries: np.ndarray, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (n, K) and their shares (n, K): of entries (n,) with these values (n,).

        A missing neighbour has the share 0, and an entry without any neighbour its own token.
        """
        tokens = torch.from_numpy(self._table.gather("tokens", entries)[:, 1:].astype(np.int64))
        scores = torch.from_numpy(self._table.gather("distances", entries)) * self._scale
        if self._table.facts.weighted:
            scores += torch.from_numpy(self._table.gather("log_weights", entries))
        missing = tokens < 0
        shares = scores.masked_fill(missing, -torch.inf).softmax(dim=1).nan_to_num(0.0)
        shares[:, 0] += missing.all(dim=1).float()
        return torch.where(missing, targets[:, None], tokens), shares


@dataclass
class Objective:
    """The loss of a batch.

    ``lm`` and ``weight``: log((1 - weight) p_LM + weight p) is maximised (Xu et al. 2023, Equation 12).
    ``neighbors``: half KL(p_kNN || p), up to what does not depend on p, and half cross-entropy.
    """

    lm: np.ndarray | None = None  # (entries,) log p_LM of each value
    weight: float = 0.25
    neighbors: NeighborShares | None = None

    @property
    def name(self) -> str:
        if self.lm is not None:
            return f"interpolated with lambda {self.weight:g}"
        return "imitation of neighbours" if self.neighbors is not None else "cross-entropy"

    def loss(self, log_probs: Tensor, entries: np.ndarray, shares: Tensor | None) -> Tensor:
        """The mean over a batch.

        Args:
            log_probs: (n, 1 + K) of the token itself, then of its neighbours' tokens
            shares: (n, K) of the neighbours
        """
        own = log_probs[:, 0]
        if self.lm is not None:
            own = mix(torch.from_numpy(self.lm[entries]), own, self.weight)
        loss = -own.mean()
        if shares is None:
            return loss
        return 0.5 * loss - 0.5 * (shares * log_probs[:, 1:]).sum(dim=1).mean()


def mix(lm: Tensor, other: Tensor, weight: float) -> Tensor:
    """log((1 - weight) p_LM + weight p): (n,), (n,) -> (n,)."""
    return torch.logaddexp(lm + math.log1p(-weight), other + math.log(weight))
