"""Which visits are left out: the regression, and the rule that follows from it."""

import numpy as np
import pytest

from fairseq_knnlm.saved_runs.skipping import learn_rule, poisson_regression


def test_the_regression_finds_what_the_data_were_made_of():
    rng = np.random.default_rng(0)
    features = np.column_stack([np.ones(20_000), rng.normal(size=(20_000, 2))])
    truth, counts = np.array([-1.0, 0.5, -0.3]), rng.integers(1, 5, 20_000)
    means = counts * np.exp(features @ truth)
    targets = means + rng.normal(size=20_000)  # many are negative
    np.testing.assert_allclose(poisson_regression(features, targets, counts), truth, atol=0.05)


def test_a_rule_prefers_what_gains():
    """Queries whose second feature is large gain, and near lists gain more than far ones."""
    rng = np.random.default_rng(1)
    early = rng.normal(size=(5000, 4))
    expected = np.log(rng.dirichlet(np.ones(8), 5000))
    counts = np.array([1, 2, 4])
    mean = 0.1 * np.exp(early[:, 1:2]) * np.array([0.5, 0.3, 0.17]) * counts
    rule = learn_rule(expected, early, mean + 0.01 * rng.normal(size=mean.shape))
    assert rule.early[1] == pytest.approx(1.0, abs=0.05) and rule.rank < -0.5
    assert np.abs(np.delete(rule.early, 1)).max() < 0.05
    worth = rule.worth(expected, early)
    visits = (worth >= np.median(worth)).sum(axis=1)
    assert visits[early[:, 1] > 1].mean() > 6 and visits[early[:, 1] < -1].mean() < 2


def test_one_list_leaves_nothing_to_learn():
    rule = learn_rule(np.zeros((10, 1)), np.zeros((10, 4)), np.zeros((10, 0)))
    assert rule.visited(np.zeros((3, 1)), np.zeros((3, 4))).all()
