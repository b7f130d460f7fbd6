"""The edit vector's distribution: samples against their mean resultant length, the KL against Monte Carlo."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.prototypes.vmf import (
    EditVectors,
    great_circle,
    kl_to_uniform,
    log_bessel,
    log_normaliser,
    log_uniform_density,
    mean_resultant_length,
    uniform_on_sphere,
)


def test_closed_forms_in_three_dimensions():
    """I_1/2(x) = sqrt(2 / (pi x)) sinh x; the mean resultant length is coth x - 1/x; the sphere's surface is 4 pi."""
    for kappa in (0.01, 1.0, 30.0, 500.0):
        log_sinh = kappa + math.log1p(-math.exp(-2 * kappa)) - math.log(2)
        assert log_bessel(0.5, kappa) == pytest.approx(0.5 * math.log(2 / (math.pi * kappa)) + log_sinh, abs=1e-9)
        assert mean_resultant_length(3, kappa) == pytest.approx(1 / math.tanh(kappa) - 1 / kappa, abs=1e-9)
    assert log_uniform_density(3) == pytest.approx(-math.log(4 * math.pi))
    assert log_normaliser(3, 1e-6) == pytest.approx(log_uniform_density(3), abs=1e-6)


def test_the_dimension_of_the_kl():
    """6.232 for 50 dimensions; 6.117 would be that of 52."""
    assert kl_to_uniform(50, 30.0) == pytest.approx(6.232, abs=5e-4)
    assert kl_to_uniform(52, 30.0) == pytest.approx(6.117, abs=5e-4)
    assert kl_to_uniform(50, 1e-4) == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize(("dim", "kappa"), [(2, 3.0), (5, 0.5), (50, 30.0)])
def test_samples(dim, kappa):
    torch.manual_seed(2)
    count = 40_000
    edits = EditVectors(dim, kappa)
    mean = F.normalize(torch.randn(dim), dim=0)
    samples = edits.sample(mean.expand(count, -1))
    torch.testing.assert_close(samples.norm(dim=1), torch.ones(count), atol=1e-5, rtol=0)
    along = samples @ mean
    error = 5 / math.sqrt(count)
    assert float(along.mean()) == pytest.approx(mean_resultant_length(dim, kappa), abs=error)
    # the rest of the mean points nowhere
    assert float((samples.mean(dim=0) - along.mean() * mean).norm()) < error
    # KL = E_q[log q - log p], by Monte Carlo and by the formula; and E_q[p / q] = 1
    ratio = edits.log_prior - edits.log_density(samples, mean.expand(count, -1))
    spread = 5 * float(ratio.std()) / math.sqrt(count)
    assert float(-ratio.mean()) == pytest.approx(edits.kl, abs=spread)


def test_density_integrates_to_one():
    """Over a circle, and over a sphere by uniform samples."""
    angles = torch.linspace(0, 2 * math.pi, 2001)[:-1]
    circle = torch.stack([angles.cos(), angles.sin()], dim=1)
    edits = EditVectors(2, 4.0)
    values = edits.log_density(circle, torch.tensor([[0.6, 0.8]])).exp()
    assert float(values.mean()) * 2 * math.pi == pytest.approx(1, abs=1e-5)
    torch.manual_seed(3)
    points = uniform_on_sphere(100_000, 4)
    density = EditVectors(4, 2.0).log_density(points, points[:1])
    assert float((density - log_uniform_density(4)).exp().mean()) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_weighted_samples_have_the_means_of_the_uniform_distribution(count):
    """The mean of exp(c . z) over the sphere is C(0) / C(|c|); of a constant it is the constant."""
    torch.manual_seed(5)
    edits, repeats = EditVectors(5, 6.0), 40_000
    mean, other = F.normalize(torch.randn(2, 5), dim=1)
    samples, log_weights = edits.weighted(mean.expand(repeats, -1), count)
    assert samples.shape == (repeats * count, 5) and log_weights.shape == (repeats * count,)
    torch.testing.assert_close(samples.norm(dim=1), torch.ones(len(samples)), atol=1e-5, rtol=0)
    weights = log_weights.double().exp()
    if count > 1:
        assert float(weights.max()) <= count / max(1, count // 4) + 1e-6
    for direction, length in ((mean, 2.0), (other, 2.0), (mean, 0.01)):
        terms = (weights * (length * samples @ direction).double().exp()).view(repeats, count).mean(dim=1)
        exact = math.exp(log_uniform_density(5) - log_normaliser(5, length))
        assert float(terms.mean()) == pytest.approx(exact, abs=5 * float(terms.std()) / math.sqrt(repeats))


def test_gradients_go_through_the_mean():
    torch.manual_seed(4)
    mean = F.normalize(torch.randn(3, 6), dim=1).requires_grad_()
    EditVectors(6, 20.0).sample(mean).sum().backward()
    assert mean.grad is not None and float(mean.grad.abs().min()) > 0


def test_great_circle():
    path = great_circle(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 3)
    np.testing.assert_allclose(path.numpy(), [[1, 0], [0.5**0.5, 0.5**0.5], [0, 1]], atol=1e-6)
    same = torch.tensor([0.6, 0.8])
    np.testing.assert_allclose(great_circle(same, same, 2).numpy(), [[0.6, 0.8]] * 2)


def test_bad_settings():
    with pytest.raises(KnnlmError, match="--edit-kappa must be above 0"):
        EditVectors(5, 0.0)
    with pytest.raises(KnnlmError, match="--edit-dim must be 2 or more"):
        EditVectors(1, 1.0)
