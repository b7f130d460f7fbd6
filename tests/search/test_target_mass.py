"""Sums over every visited entry."""

import numpy as np
import torch

from fairseq_knnlm.search.target_mass import TargetMass, runs


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
