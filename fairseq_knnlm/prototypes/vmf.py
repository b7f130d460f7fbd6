"""The von Mises-Fisher distribution on the unit sphere of d dimensions, and its divergence from the uniform one.

    density(z) = C_d(kappa) exp(kappa mu . z),    C_d(kappa) = kappa^(d/2 - 1) / ((2 pi)^(d/2) I_(d/2 - 1)(kappa))

Bessel functions come from their power series, whose terms are all positive: its logarithm is exact for any order.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import KnnlmError

LARGEST_KAPPA = 1e5  # the series has about kappa terms


def log_bessel(order: float, kappa: float) -> float:
    """log I_order(kappa), the modified Bessel function of the first kind, for kappa > 0."""
    terms = torch.arange(int(kappa) + 200, dtype=torch.float64)
    logs = (2 * terms + order) * math.log(kappa / 2) - torch.lgamma(terms + 1) - torch.lgamma(terms + order + 1)
    return float(torch.logsumexp(logs, dim=0))


def log_uniform_density(dim: int) -> float:
    """log C_d(0), which is minus the logarithm of the sphere's surface."""
    return math.lgamma(dim / 2) - math.log(2) - dim / 2 * math.log(math.pi)


def log_normaliser(dim: int, kappa: float) -> float:
    """log C_d(kappa)."""
    order = dim / 2 - 1
    return order * math.log(kappa) - dim / 2 * math.log(2 * math.pi) - log_bessel(order, kappa)


def mean_resultant_length(dim: int, kappa: float) -> float:
    """E[mu . z] = I_(d/2)(kappa) / I_(d/2 - 1)(kappa)."""
    return math.exp(log_bessel(dim / 2, kappa) - log_bessel(dim / 2 - 1, kappa))


def kl_to_uniform(dim: int, kappa: float) -> float:
    """KL(vMF(mu, kappa) || uniform), the same for every mu: E[log density] - log C_d(0)."""
    return kappa * mean_resultant_length(dim, kappa) + log_normaliser(dim, kappa) - log_uniform_density(dim)


class EditVectors:
    """vMF distributions of one kappa: samples and densities."""

    def __init__(self, dim: int, kappa: float):
        if dim < 2:
            raise KnnlmError(f"--edit-dim must be 2 or more, not {dim}")
        if not 0 < kappa <= LARGEST_KAPPA:
            raise KnnlmError(f"--edit-kappa must be above 0 and at most {LARGEST_KAPPA:g}, not {kappa:g}")
        self.dim, self.kappa = dim, kappa
        self.kl = kl_to_uniform(dim, kappa)
        self._log_normaliser, self.log_prior = log_normaliser(dim, kappa), log_uniform_density(dim)

    def log_density(self, samples: Tensor, means: Tensor) -> Tensor:
        """(n, d), (n, d) -> (n,)."""
        return self.kappa * (samples * means).sum(dim=-1) + self._log_normaliser

    def weighted(self, means: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Samples for means over the uniform prior, and what each weighs: (n, d) -> (n * count, d), (n * count,) logs.

        Most are drawn around the mean, a quarter from the prior itself (one at least, if there are two). A weight is
        p(z) divided by the mean density of all ``count`` draws (the balance heuristic of Veach & Guibas 1995): without
        bias, and never more than count / quarter. Samples around the mean alone would weigh next to nothing wherever
        the sentence hardly depends on z, and their mean would miss most of the probability.
        """
        uniform = 0 if count == 1 else max(1, count // 4)
        repeated = means.repeat_interleave(count, dim=0)
        samples = self.sample(repeated)
        if not uniform:
            return samples, self.log_prior - self.log_density(samples, repeated)
        from_prior = torch.arange(count, device=means.device).ge(count - uniform).repeat(len(means))
        drawn = F.normalize(torch.randn_like(samples), dim=-1)
        samples = torch.where(from_prior[:, None], drawn, samples)
        around = self.log_density(samples, repeated) + math.log((count - uniform) / count)
        anywhere = torch.full_like(around, self.log_prior + math.log(uniform / count))
        return samples, self.log_prior - torch.logaddexp(around, anywhere)

    def sample(self, means: Tensor) -> Tensor:
        """One sample for each mean, (n, d) -> (n, d); gradients go through the means.

        How far along the mean a sample lies does not depend on the mean (Wood 1994), and the direction across is
        uniform: so the whole batch is drawn at once, and what is rejected is drawn again.
        """
        along = self.lengths(len(means), means)[:, None]
        across = torch.randn_like(means)
        for _ in range(2):  # once more, because little is left of what nearly points along the mean
            across = F.normalize(across - (across * means).sum(dim=-1, keepdim=True) * means, dim=-1)
        return along * means + (1 - along**2).clamp(min=0).sqrt() * across

    @torch.no_grad()
    def lengths(self, count: int, like: Tensor) -> Tensor:
        """mu . z of that many samples, (count,)."""
        width = self.dim - 1
        b = width / (2 * self.kappa + math.sqrt(4 * self.kappa**2 + width**2))
        x0 = (1 - b) / (1 + b)
        bound = self.kappa * x0 + width * math.log(1 - x0**2)
        half = torch.tensor(width / 2, dtype=torch.float64, device=like.device)
        proposals = torch.distributions.Beta(half, half)
        found = torch.empty(count, dtype=torch.float64, device=like.device)
        missing = torch.arange(count, device=like.device)
        while len(missing):
            draw = proposals.sample(missing.shape)
            length = (1 - (1 + b) * draw) / (1 - (1 - b) * draw)
            log_ratio = self.kappa * length + width * torch.log1p(-x0 * length) - bound
            accepted = log_ratio >= torch.rand_like(length).log()
            found[missing[accepted]] = length[accepted]
            missing = missing[~accepted]
        return found.to(like.dtype)


def uniform_on_sphere(count: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """Samples of the prior of the edit vector, (count, dim)."""
    return F.normalize(torch.randn(count, dim, generator=generator), dim=-1)


def great_circle(first: Tensor, last: Tensor, steps: int) -> Tensor:
    """Points at equal angles from one to the other: (d,), (d,) -> (steps, d)."""
    angle = torch.acos((first @ last).clamp(-1, 1))
    shares = torch.linspace(0, 1, steps).to(first)[:, None]
    if angle < 1e-6:
        return first.expand(steps, -1)
    path = torch.sin((1 - shares) * angle) * first + torch.sin(shares * angle) * last
    return F.normalize(path, dim=-1)
