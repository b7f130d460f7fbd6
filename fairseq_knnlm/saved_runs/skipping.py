"""Which list visits matter least, as far as that is known before any list is read.

A save tells how likely each token is with its nearest 1, 2, 4, 8, ... lists, so what the lists of each rank have gained
is known. A regression explains it by what is known early: a visit is expected to gain the exponential of a linear
function of the log of its list's rank, the log of the share of the mass that the list is expected to hold, and what is
known of the query. Visits that are expected to gain least are left out.
"""

from typing import Any

import numpy as np

from ..mixture.gate import GateFacts
from ..search.early import EARLY_NAMES, VisitRule, clip_shares
from .gate_data import GateData
from .scores import SavedScores

PERCENTILES = 100
STEPS, RIDGE = 50, 1e-3


def learn_skipping(saved: SavedScores, data: GateData, facts: GateFacts) -> dict[str, Any]:
    """For each datastore whose lists are known: a rule, and its threshold for each percentage of visits left out."""
    learnt = {}
    for number, memory in enumerate(saved.run.memories, start=1):
        if memory.lists is None:
            continue
        known = saved.features(memory.name, None, memory.sharpness)
        early = np.stack([known[name].double().numpy() for name in EARLY_NAMES], axis=1)
        expected = saved.expected_shares(memory.name)
        rule = learn_rule(expected, early, _gains(saved, data, facts, number))
        worth = rule.worth(expected, early)
        # As the rule sees it: a share that a save has rounded may be a little more or less.
        thresholds = np.quantile(worth, np.linspace(0, 1, PERCENTILES + 1))
        learnt[memory.name] = {
            "rank": rule.rank, "share": rule.share, "early": rule.early, "centre": rule.centre,
            "thresholds": thresholds.tolist(),
        }  # fmt: skip
    return learnt


def _gains(saved: SavedScores, data: GateData, facts: GateFacts, number: int) -> np.ndarray:
    """What the lists of each rank but the first gain in log p of the mixture with constant weights: (n, ranks - 1)."""
    weights = np.array([1 - sum(m.weight for m in facts.memories), *(m.weight for m in facts.memories)])
    log_probs = data.log_probs.numpy()
    with np.errstate(divide="ignore"):
        parts = np.log(weights) + log_probs
    others = np.logaddexp.reduce(np.delete(parts, number, axis=1), axis=1)
    own = saved.ranked(facts.memories[number - 1].name) + np.log(max(weights[number], 1e-12))
    return np.diff(np.logaddexp(others[:, None], own), axis=1)


def learn_rule(expected: np.ndarray, early: np.ndarray, gains: np.ndarray) -> VisitRule:
    """The rule, from log shares (n, nprobe), what is known early (n, names), and gains by rank (n, ranks - 1)."""
    centre, scale = early.mean(axis=0), early.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    scaled, shares = (early - centre) / scale, clip_shares(expected)
    rows, gained, counts = [], [], []
    for rank in range(gains.shape[1]):
        lists = np.arange(1 << rank, min(2 << rank, expected.shape[1]))  # without the nearest: 1; 2, 3; 4, 5, 6, 7; ...
        place = np.full(len(early), np.log(1 + lists).mean())
        rows.append(np.column_stack([np.ones(len(early)), place, shares[:, lists].mean(axis=1), scaled]))
        gained.append(gains[:, rank])
        counts.append(np.full(len(early), len(lists)))
    if not rows:  # one list is visited, so there is nothing to leave out
        return VisitRule(-np.inf)
    weights = poisson_regression(np.concatenate(rows), np.concatenate(gained), np.concatenate(counts))
    return VisitRule(-np.inf, weights[1], weights[2], (weights[3:] / scale).tolist(), centre.tolist())


def poisson_regression(features: np.ndarray, targets: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Weights (f,) so that counts * exp(features @ weights) is the mean of the targets; the first feature is 1.

    Newton steps on a concave function, each halved until it grows; a little ridge, because features may be nearly the
    same. Targets may be negative, as long as their mean is not.
    """
    mean = max(targets.sum() / counts.sum(), 1e-9)
    weights = np.zeros(features.shape[1])
    weights[0] = np.log(mean)
    penalty = RIDGE * counts.sum() * mean * np.diag([0.0] + [1.0] * (features.shape[1] - 1))

    def value(tried: np.ndarray) -> float:
        with np.errstate(over="ignore"):
            logs = features @ tried
            return float(targets @ logs - counts @ np.exp(logs) - 0.5 * tried @ penalty @ tried)

    for _ in range(STEPS):
        expected = counts * np.exp(features @ weights)
        gradient = features.T @ (targets - expected) - penalty @ weights
        step = np.linalg.solve((features * expected[:, None]).T @ features + penalty, gradient)
        while not value(weights + step) > value(weights) and np.abs(step).max() > 1e-9:
            step /= 2
        weights = weights + step
        if np.abs(step).max() < 1e-6:
            break
    return weights
