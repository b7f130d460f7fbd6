"""What happens to a key before the output embedding: nothing, several projections with a gate, or a small network.

A trunk gives one or several states, and log of the weight of each.
"""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Trunk(nn.Module):
    """From keys (n, dim) to states, each (n, dim), and their log weights (n, states); None: there is one state."""

    @abstractmethod
    def forward(self, keys: Tensor) -> tuple[list[Tensor], Tensor | None]: ...


class NoTrunk(Trunk):
    """The key itself."""

    def forward(self, keys: Tensor) -> tuple[list[Tensor], Tensor | None]:
        return [keys], None


class MixtureTrunk(Trunk):
    """A mixture of softmaxes (Yang et al. 2018; Xu et al. 2023, appendix C.2).

    State c is size * tanh(P_c h), and its weight softmax_c(G h). The tanh alone would leave no more than 1 in each
    dimension, less than keys have, for an output embedding that was made for them.
    """

    def __init__(self, dim: int, components: int, size: float = 1.0):
        super().__init__()
        self.projections = nn.Parameter(torch.empty(components, dim, dim))
        self.gate = nn.Parameter(torch.zeros(components, dim))
        self.size = nn.Parameter(torch.tensor([size]))
        for projection in self.projections:  # near to the identity, and different from each other
            nn.init.normal_(projection, std=0.3 * dim**-0.5)
            projection.data += torch.eye(dim) / size

    def forward(self, keys: Tensor) -> tuple[list[Tensor], Tensor | None]:
        states = [self.size * torch.tanh(keys @ projection.T) for projection in self.projections]
        return states, F.log_softmax(keys @ self.gate.T, dim=1)


class NetworkTrunk(Trunk):
    """Residual feed-forward layers: x + W2 gelu(W1 norm(x)), and a norm at the end."""

    def __init__(self, dim: int, depth: int, width: int):
        super().__init__()
        self.layers = nn.ModuleList(_layer(dim, width) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, keys: Tensor) -> tuple[list[Tensor], Tensor | None]:
        state = keys
        for layer in self.layers:
            state = state + layer(state)
        return [self.norm(state)], None


def _layer(dim: int, width: int) -> nn.Sequential:
    """A feed-forward layer that begins with saying nothing, so that the network begins as the identity."""
    last = nn.Linear(width, dim)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, width), nn.GELU(), last)


def make_trunk(kind: str, dim: int, components: int = 0, depth: int = 0, size: float = 1.0) -> Trunk:
    """The trunk of a kind of head."""
    if kind == "mos":
        return MixtureTrunk(dim, components, size)
    return NetworkTrunk(dim, depth, 4 * dim) if kind == "network" else NoTrunk()
