"""The best weights of a mixture: a concave problem with one maximum, solved to a certified tolerance."""

import numpy as np

from ..mixture.interpolation import LOG_ZERO


def mixture_log_probs(log_probs: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """log of the weighted sum: log_probs (m, n), weights (m,) -> (n,)."""
    largest = log_probs.max(axis=0)
    with np.errstate(divide="ignore"):
        log_sums = np.log(weights @ np.exp(log_probs - largest)) + largest
    # A token that no part of the mixture gives any mass counts as in fairseq-eval-lm: with the smallest float.
    return np.maximum(log_sums, LOG_ZERO)


def best_weights(log_probs: np.ndarray, tolerance: float = 1e-9) -> np.ndarray:
    """Weights (m,) on the simplex that maximise the mean log-likelihood of the mixture of log_probs (m, n).

    Newton steps inside the simplex, and where one would leave it or does not help, a step of expectation-maximisation,
    which always does. By concavity the mean log-likelihood is within max(gradient) - 1 of its maximum.
    """
    shares = np.exp(log_probs - log_probs.max(axis=0))  # a common factor of a token changes no weight
    weights: np.ndarray = np.full(len(shares), 1 / len(shares))
    for _ in range(10_000):
        ratios = shares / (weights @ shares)
        gradient = ratios.mean(axis=1)
        if gradient.max() - 1 < tolerance:
            break
        newton = _newton(weights, gradient, ratios)
        em = weights * gradient
        weights = em / em.sum()
        if newton is not None and _mean_log(newton, shares) > _mean_log(em, shares):
            weights = newton
    return weights


def _mean_log(weights: np.ndarray, shares: np.ndarray) -> float:
    return float(np.log(weights @ shares).mean())


def _newton(weights: np.ndarray, gradient: np.ndarray, ratios: np.ndarray) -> np.ndarray | None:
    """The maximum of the quadratic model with the weights' sum fixed, cut off well before the simplex ends."""
    size = len(weights)
    system = np.zeros((size + 1, size + 1))
    system[:size, :size] = ratios @ ratios.T / ratios.shape[1]  # minus the Hessian
    system[:size, size] = system[size, :size] = 1.0
    step = np.linalg.lstsq(system, np.append(gradient, 0.0), rcond=None)[0][:size]
    shrinking = step < 0
    if not np.isfinite(step).all() or not step.any():
        return None
    longest = (weights[shrinking] / -step[shrinking]).min() if shrinking.any() else 1.0
    moved = weights + min(1.0, 0.95 * longest) * step
    return moved / moved.sum()
