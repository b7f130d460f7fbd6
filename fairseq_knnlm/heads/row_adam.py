"""Adam (Kingma and Ba 2015) that touches only the rows that a step is about.

In a step of training a few thousand rows of an output embedding have a gradient. The others stay as they are, and so do
their moments; each row counts its own steps for the correction of the bias.
"""

import torch
from torch import Tensor

BETAS = (0.9, 0.99)
EPSILON = 1e-8


class RowAdam:
    """The moments of one tensor, whose first dimension are its rows."""

    def __init__(self, values: Tensor):
        self.values = values
        self.mean, self.square = torch.zeros_like(values), torch.zeros_like(values)
        self.count = torch.zeros(len(values))

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float, rows: Tensor | None = None) -> None:
        """Change the values, or only some rows of them: gradient (all or rows, ...)."""
        mean, square = (self.mean, self.square) if rows is None else (self.mean[rows], self.square[rows])
        count = self.count.add_(1) if rows is None else self.count[rows] + 1
        mean.lerp_(gradient, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        if rows is not None:
            self.mean[rows], self.square[rows], self.count[rows] = mean, square, count
        shape = (-1, *(1 for _ in range(gradient.dim() - 1)))
        first, second = (1 - beta**count for beta in BETAS)
        change = mean / (square / second.view(shape)).sqrt_().add_(EPSILON)
        change.mul_(-rate / first.view(shape))
        if rows is None:
            self.values += change
        else:
            self.values.index_add_(0, rows, change)

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on; the tensors themselves."""
        return {"values": self.values, "mean": self.mean, "square": self.square, "count": self.count}
