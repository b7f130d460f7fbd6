"""The prior over prototypes: theta ~ Dir(alpha), with the posterior q(theta) = Dir(lambda) that training estimates.

lambda has no gradient. After each update of the network

    lambda <- (1 - rho) lambda + rho (alpha + N * mean over the batch of q(t|x)),    rho = (u + 1)^-0.8

where N is the number of training sentences and u the number of such steps before this one (Hoffman et al. 2013).
"""

import torch
from torch import Tensor, nn

from ..errors import KnnlmError

FORGETTING = 0.8  # the exponent of rho, as in the public code's settings
MASS_OF_ACTIVE = 0.9


def expected_log_theta(concentration: Tensor) -> Tensor:
    """E[log theta] under Dir(concentration): (K,) -> (K,)."""
    return torch.digamma(concentration) - torch.digamma(concentration.sum())


def dirichlet_kl(concentration: Tensor, alpha: float) -> Tensor:
    """KL(Dir(concentration) || Dir(alpha, ..., alpha)): (K,) -> ()."""
    count, total = len(concentration), concentration.sum()
    prior = torch.tensor(alpha, dtype=concentration.dtype, device=concentration.device)
    normaliser = torch.lgamma(total) - torch.lgamma(concentration).sum()
    prior_normaliser = torch.lgamma(count * prior) - count * torch.lgamma(prior)
    return normaliser - prior_normaliser + ((concentration - alpha) * expected_log_theta(concentration)).sum()


def count_active(weights: Tensor, mass: float = MASS_OF_ACTIVE) -> int:
    """The fewest prototypes that hold this share of the mass. weights: (K,); rounding may leave some below zero."""
    weights = weights.double().clamp(min=0)
    shares = (weights / weights.sum()).sort(descending=True).values.cumsum(0)
    return min(int((shares < mass - 1e-12).sum()) + 1, len(weights))


class PrototypePrior(nn.Module):
    """q(theta) as a buffer, so that it is in every checkpoint; without alpha it is uniform and stays so."""

    concentration: Tensor  # lambda, (K,) in double precision
    steps: Tensor  # u

    def __init__(self, prototypes: int, sentences: int, alpha: float | None):
        """
        Args:
            prototypes: K
            sentences: N, those that are trained on
            alpha: below 1 is sparse; None is the dense editor
        """
        super().__init__()
        if alpha is not None and not alpha > 0:
            raise KnnlmError(f"--prototype-alpha must be above 0, not {alpha:g}; 0.1 to 0.3 are sparse")
        self.alpha, self.sentences = alpha, sentences
        start = (alpha or 0.0) + sentences / prototypes  # what a retriever without any preference would give
        self.register_buffer("concentration", torch.full((prototypes,), start, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.forget()

    def __len__(self) -> int:
        return len(self.concentration)

    def log_prior(self) -> Tensor:
        """What q(t|x) is compared with: E_q[log theta], (K,) float32; log 1/K where the prior is uniform."""
        if self.alpha is None:
            return torch.full_like(self.concentration, 1.0 / len(self)).log().float()
        return expected_log_theta(self.concentration).float()

    def log_mean(self) -> Tensor:
        """log of the mean of theta, (K,) in double precision: p(t) at test time."""
        return (self.concentration / self.concentration.sum()).log()

    def kl(self) -> float:
        """KL(q(theta) || p(theta)); 0 for the uniform prior."""
        return 0.0 if self.alpha is None else float(dirichlet_kl(self.concentration, self.alpha))

    def active(self, mass: float = MASS_OF_ACTIVE) -> int:
        """The fewest prototypes that hold this share of what sentences gave them.

        alpha, which each has by the prior, is left out: of many prototypes it is a large share of all mass, which
        would make thousands active that no sentence ever retrieves.
        """
        return count_active(self.concentration - (self.alpha or 0.0), mass)

    def best(self, count: int) -> Tensor:
        """The prototypes with the most mass, heaviest first; of equals the first. (count,)"""
        if not 1 <= count <= len(self):
            raise KnnlmError(f"--prune-num must be 1 to {len(self):,}, the number of prototypes, not {count:,}")
        return self.concentration.argsort(descending=True, stable=True)[:count]

    # --- the update -------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop what was observed since the last step."""
        self._sum: Tensor | None = None
        self._count = 0

    def observe(self, retrieved: Tensor) -> None:
        """Note q(t|x) of a batch, (B, K), for the next step; several batches make one step with --update-freq."""
        if self.alpha is None:
            return
        total = retrieved.detach().double().sum(dim=0)
        self._sum = total if self._sum is None else self._sum + total
        self._count += len(retrieved)

    @torch.no_grad()
    def step(self) -> None:
        """Move lambda towards what was observed, by all workers together."""
        if self.alpha is None:
            return
        total = torch.zeros_like(self.concentration) if self._sum is None else self._sum.to(self.concentration)
        counted = torch.cat([total, total.new_tensor([self._count])])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(counted)
        self.forget()
        if counted[-1] == 0:
            return
        rho = (int(self.steps) + 1) ** -FORGETTING
        target = self.alpha + self.sentences * counted[:-1] / counted[-1]
        self.concentration.mul_(1 - rho).add_(rho * target)
        self.steps += 1
