"""The best weights and settings, against a grid."""

import numpy as np
import pytest
from saves import random_save

from fairseq_knnlm.saved_runs.scores import SavedScores
from fairseq_knnlm.saved_runs.settings import Settings, evaluate, with_best_weights
from fairseq_knnlm.saved_runs.tuning import Tally, tune
from fairseq_knnlm.saved_runs.weights import best_weights, mixture_log_probs


def test_best_weights_reach_the_grid_optimum():
    rng = np.random.default_rng(0)
    log_probs = np.log(rng.dirichlet([0.3] * 3, 5000).T + 1e-9) + rng.normal(size=(3, 1))
    grid = [
        (a, b, 1 - a - b) for a in np.linspace(0, 1, 101) for b in np.linspace(0, 1, 101) if a + b <= 1 + 1e-12
    ]
    best = max(mixture_log_probs(log_probs, np.array(weights)).mean() for weights in grid)
    weights = best_weights(log_probs)
    assert weights.sum() == pytest.approx(1) and (weights >= 0).all()
    ours = mixture_log_probs(log_probs, weights).mean()
    assert best <= ours + 1e-9 and ours - best < 1e-3


@pytest.mark.parametrize("useless", [-50.0, -np.inf])
def test_best_weights_at_the_edge(useless):
    """A member that never helps gets nothing, and that ends the search in time."""
    log_probs = np.stack([np.full(1000, -2.0), np.full(1000, useless)])
    np.testing.assert_allclose(best_weights(log_probs), [1, 0], atol=1e-6)
    log_probs[1] = -1.0
    np.testing.assert_allclose(best_weights(log_probs), [0, 1], atol=1e-6)


def test_tune_reaches_the_grid_optimum(tmp_path):
    evidence = SavedScores.open([random_save(tmp_path / "save", count=1500).folder])
    tally = Tally()
    ours = evaluate(evidence, tune(evidence, tally)).mixture
    assert tally.settings > 100  # settings that were compared
    best = min(
        evaluate(evidence, with_best_weights(evidence, Settings((0, 0), k, (temperature,), size, theta))).mixture
        for k in (4, 8, 16)
        for temperature in (0.5, 1, 2, 4, 8)
        for size in (12, 24)
        for theta in (0.1, 0.25, 0.5, 1)
    )
    assert ours < best * 1.0005
