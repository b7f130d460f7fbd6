"""The mixture: log((1 - sum of lambdas) p_LM + sum_j lambda_j p_j), in float32 log space."""

import math

import torch
from torch import Tensor

# Stock fairseq-eval-lm drops infinite scores from the sum *and* the count, which flatters; this one it keeps.
LOG_ZERO = torch.finfo(torch.float32).min


def interpolate_by_token(lm: Tensor, others: list[Tensor], log_weights: Tensor) -> Tensor:
    """log(w_0 p_LM + sum_j w_j p_j), with weights of each token.

    Args:
        lm: (n,) or (n, vocabulary), as each of the others
        log_weights: (n, 1 + others)
    """
    shape = (-1,) + (1,) * (lm.dim() - 1)
    of_each = log_weights.to(lm.device).float().unbind(dim=1)
    mixture = lm.float() + of_each[0].view(shape)
    for log_probs, log_weight in zip(others, of_each[1:]):
        mixture = torch.logaddexp(mixture, log_probs.to(mixture) + log_weight.view(shape))
    return mixture.clamp(min=LOG_ZERO)


def interpolate(lm: Tensor, others: list[Tensor], weights: list[float]) -> Tensor:
    """log((1 - sum of weights) p_LM + sum_j weight_j p_j), all of one shape."""
    mixture = lm.float() + _log(1.0 - sum(weights))
    for log_probs, weight in zip(others, weights):
        mixture = torch.logaddexp(mixture, log_probs.to(mixture) + _log(weight))
    return mixture.clamp(min=LOG_ZERO)


def log_mean(log_probs: list[Tensor]) -> Tensor:
    """Log of the mean of probabilities, all of one shape: what fairseq makes of the models of an ensemble."""
    return torch.stack(log_probs).logsumexp(dim=0) - math.log(len(log_probs)) if len(log_probs) > 1 else log_probs[0]


def _log(weight: float) -> float:
    return math.log(weight) if weight > 0 else -math.inf


def perplexity(mean_log_prob: float) -> float:
    """exp(-mean log p). A text that has no probability at all has an infinite one, which is a result, not an error."""
    try:
        return math.exp(-mean_log_prob)
    except OverflowError:
        return math.inf
