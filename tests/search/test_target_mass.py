"""Sums over every visited entry."""

import numpy as np
import torch

from fairseq_knnlm.parallel import Unlocked
from fairseq_knnlm.search.target_mass import TargetMass, TargetRuns, runs, shares_of_block


def test_one_sharpness_is_as_good_as_several():
    """The sums of one factor do not depend on which others are asked for with it."""
    rng = np.random.default_rng(0)
    similarities = torch.from_numpy(rng.normal(size=(5, 30)).astype(np.float32))
    values, targets = np.sort(rng.integers(0, 4, 30)), rng.integers(0, 6, 5)
    for factor in (0.5, 1.0, 2.0):
        results = []
        for factors in ([factor], [0.25, 0.5, 1.0, 2.0]):
            mass = TargetMass(targets, factors)
            mass.add(torch.arange(5), similarities.clone(), torch.zeros(5), *runs(values))
            found = mass.result()
            results.append([sums[factors.index(factor)] for sums in (found.target, found.total)])
        expected = np.exp(similarities.double().numpy() * factor)
        of_target = (expected * (values == targets[:, None])).sum(axis=1)
        for target, total in results:
            np.testing.assert_allclose(np.exp(total), expected.sum(axis=1), rtol=1e-5)
            np.testing.assert_allclose(np.exp(target), of_target, rtol=1e-5)


def test_where_targets_are():
    """The example of the docstring, and targets beyond both ends."""
    parts, block = runs(np.array([3, 5, 5, 8])), torch.arange(12.0).view(3, 4)
    found = TargetRuns(*parts, np.array([5, 7, 8]))
    assert (found.rows.tolist(), found.begins.tolist(), found.ends.tolist()) == ([0, 2], [1, 11], [3, 12])
    assert found.sums(block).tolist() == [3, 0, 11]
    assert TargetRuns(*parts, np.array([0, 9, 3])).sums(block).tolist() == [0, 0, 8]
    assert TargetRuns(*parts, np.array([0, 9, 0])).sums(block).tolist() == [0, 0, 0]


def test_the_short_way_at_one_sharpness_is_the_long_one():
    rng = np.random.default_rng(1)
    similarities = torch.from_numpy(rng.normal(size=(5, 30)).astype(np.float32) * 9)
    values, targets, constants = np.sort(rng.integers(0, 4, 30)), rng.integers(0, 6, 5), torch.randn(5)
    for weights in (None, torch.rand(30) + 0.5):
        long, short = (TargetMass(targets, [1.0], keep_mean=True) for _ in range(2))
        long.add(torch.arange(5), similarities.clone(), constants, *runs(values), weights=weights)
        shares = shares_of_block(similarities.clone(), constants, weights)
        compiled = Unlocked(shares_of_block)(similarities.clone(), constants, weights)
        assert all(torch.equal(one, other) for one, other in zip(shares, compiled))
        short.add_shares(torch.arange(5), *shares, *runs(values))
        for one, other in zip(vars(long.result()).values(), vars(short.result()).values()):
            assert (one is None and other is None) or np.array_equal(one, other)
