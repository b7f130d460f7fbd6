"""The mixture: log((1 - sum of lambdas) p_LM + sum_j lambda_j p_j), in float32 log space."""

import math

import torch
from torch import Tensor

# Stock fairseq-eval-lm drops infinite scores from the sum *and* the count, which flatters; this one it keeps.
LOG_ZERO = torch.finfo(torch.float32).min


def interpolate(lm: Tensor, others: list[Tensor], weights: list[float]) -> Tensor:
    """log((1 - sum of weights) p_LM + sum_j weight_j p_j), all of one shape."""
    mixture = lm.float() + _log(1.0 - sum(weights))
    for log_probs, weight in zip(others, weights):
        mixture = torch.logaddexp(mixture, log_probs.to(mixture) + _log(weight))
    return mixture.clamp(min=LOG_ZERO)


def _log(weight: float) -> float:
    return math.log(weight) if weight > 0 else -math.inf


def perplexity(mean_log_prob: float) -> float:
    """exp(-mean log p). A text that has no probability at all has an infinite one, which is a result, not an error."""
    try:
        return math.exp(-mean_log_prob)
    except OverflowError:
        return math.inf
