"""Probabilities against a few lines of NumPy, with everything that can go wrong in a neighbour list."""

import math

import numpy as np
import pytest
import torch

from fairseq_knnlm.memory.probabilities import (
    entropy,
    log_probs_of_masses,
    neighbor_log_weights,
    similarities,
    target_log_probs,
    vocabulary_log_probs,
)

VOCABULARY = 7


def brute_force(distances, ids, values, metric, temperature):
    """p_kNN over the vocabulary, in float64."""
    p = np.zeros((len(ids), VOCABULARY))
    for row in range(len(ids)):
        found = ids[row] >= 0
        score = distances[row][found].astype(np.float64) * (1 if metric == "ip" else -1) / temperature
        if found.any():
            weights = np.exp(score - score.max())
            np.add.at(p[row], values[row][found], weights / weights.sum())
    return p


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 5.0])
def test_against_numpy(metric, temperature):
    rng = np.random.default_rng(0)
    distances = rng.uniform(0, 300, (20, 16)).astype(np.float32)
    distances[:, 5] = distances[:, 4]  # duplicate keys
    ids = rng.integers(0, 100, (20, 16))
    ids[3, 4:] = -1  # few neighbours
    ids[4, :] = -1  # none
    distances[4] = np.finfo(np.float32).max
    values = rng.integers(0, VOCABULARY, (20, 16))
    expected = brute_force(distances, ids, values, metric, temperature)
    near = similarities(torch.from_numpy(distances), torch.from_numpy(ids), metric)
    weights = neighbor_log_weights(near, 1 / temperature)
    everything = vocabulary_log_probs(weights, torch.from_numpy(values), VOCABULARY)
    np.testing.assert_allclose(everything.exp(), expected, atol=1e-5)
    targets = rng.integers(0, VOCABULARY, 20)
    of_target = target_log_probs(weights, torch.from_numpy(values == targets[:, None]))
    np.testing.assert_allclose(of_target.exp(), expected[np.arange(20), targets], atol=1e-5)
    # the column of the target is the same number wherever it comes from
    np.testing.assert_allclose(of_target, everything[torch.arange(20), torch.from_numpy(targets)], atol=1e-5)


def test_huge_distances_do_not_underflow():
    distances = torch.tensor([[1e5, 1e5 + 1.0]])
    weights = neighbor_log_weights(similarities(distances, torch.tensor([[0, 1]]), "l2"), 1.0)
    np.testing.assert_allclose(weights.exp(), [[1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))]], rtol=1e-5)


def test_effective_number_of_neighbors():
    shares = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(entropy(shares.log()).exp(), [2.0, 1.0, 1.0], rtol=1e-6)


def test_masses_of_one_query():
    """Values may repeat, masses may be far from 1, and none may be there."""
    values, log_masses = np.array([3, 1, 3, 0]), np.array([-1000.0, -1001.0, -1002.0, -np.inf])
    first, second, third, _ = np.exp(log_masses + 1000)
    expected = np.array([0, second, 0, first + third, 0]) / (first + second + third)
    np.testing.assert_allclose(np.exp(log_probs_of_masses(values, log_masses, 5)), expected, rtol=1e-6)
    for nothing in (values[:0], log_masses[:0]), (values, np.full(4, -np.inf)):
        assert (log_probs_of_masses(*nothing, 5) == -np.inf).all()
