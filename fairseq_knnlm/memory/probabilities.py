"""From distances to the shares of neighbours, and from these to log-probabilities.

Shapes: n queries, k neighbours each. Everything is float32 and in log space. A neighbour with id -1 is missing (the
index found fewer than k) and gets no mass; log 0 is -inf here and never leaves the mixture.
"""

import math

import numpy as np
import torch
from torch import Tensor

from ..search.distances import similarity_scale

SMALLEST = torch.finfo(torch.float32).min


def similarities(distances: Tensor, ids: Tensor, metric: str) -> Tensor:
    """The larger the nearer: distances (n, k), ids (n, k) -> (n, k), -inf where there is no neighbour."""
    return (distances.float() * similarity_scale(metric, 1.0)).masked_fill(ids < 0, -math.inf)


def neighbor_log_weights(similarities: Tensor, sharpness: float, log_weights: Tensor | None = None) -> Tensor:
    """Log of each neighbour's share: similarities (n, k) -> (n, k). Sharpness is 1/T, or a cache's theta.

    Args:
        log_weights: (n, k) log of the weights of the entries, which no sharpness changes; None: each counts 1
    """
    # 0 * -inf is not a number, so an absent neighbour needs saying again.
    scores = similarities * sharpness if log_weights is None else similarities * sharpness + log_weights
    scores = scores.masked_fill(similarities == -math.inf, -math.inf)
    # log_softmax subtracts the largest first, which keeps digits that (scores - logsumexp) would lose. A query may have
    # no neighbour at all.
    return scores.log_softmax(dim=1).nan_to_num(nan=-math.inf, neginf=-math.inf)


def target_log_probs(log_weights: Tensor, matches: Tensor) -> Tensor:
    """log p of the targets: weights (n, k), whether each value is the target (n, k) -> (n,), -inf where none is."""
    return log_weights.masked_fill(~matches, -math.inf).logsumexp(dim=1)


def entropy(log_weights: Tensor) -> Tensor:
    """Entropy of the neighbours' shares, in nats: (n, k) -> (n,). Its exponential is their effective number."""
    return -(log_weights.exp() * log_weights.clamp(min=SMALLEST)).sum(dim=1)


def vocabulary_log_probs(log_weights: Tensor, neighbor_values: Tensor, vocabulary_size: int) -> Tensor:
    """log p_kNN of every token: weights (n, k), values (n, k) -> (n, vocabulary)."""
    shape, device = (len(log_weights), vocabulary_size), log_weights.device
    # In double precision nothing underflows that could matter, down to e^-745.
    sums = torch.zeros(shape, dtype=torch.double, device=device)
    sums.scatter_add_(1, neighbor_values.long(), log_weights.double().exp())
    # Logarithms of the few tokens that are there, since one of each token would take longer than all the rest.
    present = sums.nonzero(as_tuple=True)
    log_probs = torch.full(shape, -math.inf, device=device)
    log_probs[present] = sums[present].log().float()
    return log_probs


def log_probs_of_masses(values: np.ndarray, log_masses: np.ndarray, vocabulary_size: int) -> np.ndarray:
    """log p_kNN of every token for one query: values (m,), which may repeat, log masses (m,) -> (vocabulary,)."""
    log_probs = np.full(vocabulary_size, -np.inf, np.float32)
    largest = log_masses.max(initial=-np.inf)
    if largest > -np.inf:
        masses = np.exp(log_masses - largest)  # in double precision, where nothing that matters underflows
        sums = np.bincount(values, masses, vocabulary_size)
        present = np.flatnonzero(sums > 0)  # for one logarithm of each token would take longer than all the rest
        log_probs[present] = np.log(sums[present] / masses.sum())
    return log_probs
