"""The prior over prototypes against Monte Carlo, and its update by hand."""

import math

import pytest
import torch

from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.prototypes.dirichlet import PrototypePrior, count_active, dirichlet_kl, expected_log_theta


@pytest.fixture
def concentration() -> torch.Tensor:
    return torch.tensor([0.7, 2.5, 0.3, 4.0, 1.1], dtype=torch.float64)


def test_expectation_and_kl_against_monte_carlo(concentration):
    torch.manual_seed(1)
    posterior = torch.distributions.Dirichlet(concentration)
    prior = torch.distributions.Dirichlet(torch.full_like(concentration, 0.3))
    theta = posterior.sample((200_000,)).clamp(min=1e-300)
    difference = posterior.log_prob(theta) - prior.log_prob(theta)
    error = float(difference.std()) / math.sqrt(len(theta))
    assert float(dirichlet_kl(concentration, 0.3)) == pytest.approx(float(difference.mean()), abs=5 * error)
    torch.testing.assert_close(expected_log_theta(concentration), theta.log().mean(dim=0), atol=0.03, rtol=0.01)
    assert float(dirichlet_kl(torch.full((4,), 0.3, dtype=torch.float64), 0.3)) == pytest.approx(0, abs=1e-12)


def test_lambda_after_two_updates_by_hand():
    """N = 10, K = 3, alpha = 0.2. The first step takes all (rho = 1), the second 2^-0.8 of what it sees."""
    prior = PrototypePrior(3, 10, 0.2)
    torch.testing.assert_close(prior.concentration, torch.full((3,), 0.2 + 10 / 3, dtype=torch.float64))
    prior.observe(torch.tensor([[0.5, 0.5, 0.0]]))
    prior.observe(torch.tensor([[1.0, 0.0, 0.0]]))  # of the same update: the mean is 0.75, 0.25, 0
    prior.step()
    torch.testing.assert_close(prior.concentration, torch.tensor([7.7, 2.7, 0.2], dtype=torch.float64))
    prior.observe(torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.5, 0.5]]))
    prior.step()
    rho = 2**-0.8
    expected = [(1 - rho) * old + rho * new for old, new in [(7.7, 0.2), (2.7, 2.7), (0.2, 7.7)]]
    torch.testing.assert_close(prior.concentration, torch.tensor(expected, dtype=torch.float64))
    assert int(prior.steps) == 2
    prior.step()  # nothing was seen
    assert int(prior.steps) == 2


def test_active_and_pruned():
    assert count_active(torch.tensor([5.0, 85.0, 5.0, 5.0])) == 2
    assert count_active(torch.tensor([90.0, 10.0])) == 1
    assert count_active(torch.ones(10)) == 9
    prior = PrototypePrior(4, 100, 0.1)
    prior.concentration.copy_(torch.tensor([1.0, 8.0, 0.5, 8.0]))
    assert prior.best(3).tolist() == [1, 3, 0]
    torch.testing.assert_close(prior.log_mean().exp().sum().item(), 1.0)


def test_alpha_makes_no_prototype_active():
    """Two of 1,000 prototypes have all that sentences gave, although the others hold two thirds of the mass."""
    prior = PrototypePrior(1000, 100, 0.2)
    prior.concentration.fill_(0.2)
    prior.concentration[[7, 9]] += 50
    assert prior.active() == 2
    assert PrototypePrior(1000, 100, None).active() == 900


def test_the_uniform_prior_learns_nothing():
    prior = PrototypePrior(4, 100, None)
    prior.observe(torch.tensor([[1.0, 0, 0, 0]]))
    prior.step()
    assert prior.kl() == 0 and len(set(prior.concentration.tolist())) == 1
    torch.testing.assert_close(prior.log_prior(), torch.full((4,), -math.log(4)))


@pytest.mark.parametrize("alpha", [0.0, -1.0])
def test_alpha_must_be_positive(alpha):
    with pytest.raises(KnnlmError, match="--prototype-alpha must be above 0"):
        PrototypePrior(4, 100, alpha)


@pytest.mark.parametrize("count", [0, 5])
def test_no_more_prototypes_than_there_are(count):
    with pytest.raises(KnnlmError, match="--prune-num must be 1 to 4"):
        PrototypePrior(4, 100, 0.1).best(count)
