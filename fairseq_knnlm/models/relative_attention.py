"""Attention over a segment and the states before it, with relative positions (Transformer-XL, Dai et al. 2019)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def relative_positions(length: int, dim: int, device: torch.device) -> Tensor:
    """Sinusoids of the distances length-1, ..., 1, 0: (length, dim)."""
    distances = torch.arange(length - 1, -1, -1.0, device=device)
    frequencies = torch.exp(torch.arange(0, dim, 2, device=device) * (-math.log(10000.0) / dim))
    angles = distances[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class RelativeAttention(nn.Module):
    """Multi-head attention whose scores depend on content and distance, each with its own bias vector.

        score(i, j) = (q_i + u) . k_j + (q_i + v) . r_(i-j)
    """

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.position = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, dim // heads))  # u
        self.position_bias = nn.Parameter(torch.zeros(heads, dim // heads))  # v

    def forward(self, states: Tensor, memory: Tensor, positions: Tensor, future: Tensor) -> Tensor:
        """
        Args:
            states: (B, T, C)
            memory: (B, M, C), what came before; M may be 0
            positions: (M + T, C), of relative_positions
            future: (T, T), of future_positions
        """
        batch, length, dim = states.shape
        context = torch.cat([memory, states], dim=1)
        total = context.size(1)
        scale = (dim / self.heads) ** -0.5

        def split(projected: Tensor) -> Tensor:  # (B, *, C) -> (B * H, *, C / H)
            parts = projected.view(batch, -1, self.heads, dim // self.heads)
            return parts.transpose(1, 2).reshape(batch * self.heads, -1, dim // self.heads)

        def biased(bias: Tensor) -> Tensor:
            return split((queries + bias.flatten()) * scale)

        queries = self.query(states)
        keys, values = (split(part) for part in self.key_value(context).chunk(2, dim=-1))
        by_distance = self.position(positions).view(total, self.heads, -1).permute(1, 2, 0)  # (H, C / H, M + T)
        place = biased(self.position_bias).view(batch, self.heads, length, -1) @ by_distance
        scores = torch.baddbmm(_shift(place).flatten(0, 1), biased(self.content_bias), keys.transpose(1, 2))
        scores[:, :, total - length :].masked_fill_(future, -torch.inf)
        shares = F.dropout(scores.softmax(dim=-1), self.dropout, self.training)  # (B * H, T, M + T)
        heads = (shares @ values).view(batch, self.heads, length, -1)
        return self.output(heads.transpose(1, 2).reshape(batch, length, dim))


def future_positions(length: int, device: torch.device) -> Tensor:
    """Which positions of its segment a position must not see: (T, T). All of the memory lies before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def _shift(scores: Tensor) -> Tensor:
    """Column d of row i belongs to a fixed distance; afterwards column j belongs to position j.

    (B, H, T, M + T), rows relative to the last query -> the same shape. Row i has to move left by T - 1 - i: a zero
    column in front and reading the whole as one long row does that. What comes in from the next row is in the future.
    """
    batch, heads, length, total = scores.shape
    padded = F.pad(scores, (1, 0)).view(batch, heads, total + 1, length)
    return padded[:, :, 1:].reshape(batch, heads, length, total)
