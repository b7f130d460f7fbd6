"""Retrieval: masks per row, the KL, and REINFORCE against exact enumeration."""

import numpy as np
import pytest
import torch

from fairseq_knnlm.prototypes.retriever import Retriever, masked_log_softmax, reinforce_loss, retrieval_kl


def test_a_sentence_does_not_retrieve_itself_but_others_of_its_batch_may():
    torch.manual_seed(1)
    scores = torch.randn(3, 5)
    own = torch.tensor([2, -1, 4])
    log_q = masked_log_softmax(scores, own)
    for row, column in enumerate(own.tolist()):
        expected = scores[row].double().exp().numpy()
        if column >= 0:
            expected[column] = 0.0
        np.testing.assert_allclose(log_q[row].exp().numpy(), expected / expected.sum(), rtol=1e-5)
    assert log_q[1, 2] > -torch.inf and log_q[2, 2] > -torch.inf  # a column belongs to no other row


def test_kl_by_sums():
    log_q = masked_log_softmax(torch.tensor([[0.3, -1.0, 0.5], [0.0, 0.0, 0.0]]), torch.tensor([1, -1]))
    log_prior = torch.tensor([-0.5, -3.0, -1.5])  # of E[log theta], which is no distribution
    q = log_q.exp().numpy()
    expected = [sum(p * (np.log(p) - m) for p, m in zip(row, log_prior.tolist()) if p > 0) for row in q]
    np.testing.assert_allclose(retrieval_kl(log_q, log_prior).numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_reinforce_equals_exact_enumeration_over_five_templates(samples):
    """The expected gradient of the surrogate is that of -E_q[reward], for every number of samples."""
    torch.manual_seed(3)
    sentences, templates = torch.randn(2, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    rewards = 3 * torch.randn(2, 5, dtype=torch.float64) - 10
    retriever = Retriever(3).double()
    own = torch.tensor([4, -1])

    def gradient(loss):
        (found,) = torch.autograd.grad(loss, retriever.weight)
        return found

    log_q = retriever(sentences, templates, own)
    expected = (sentences @ templates.T).double().exp()  # W is the identity to begin with
    expected[0, 4] = 0
    torch.testing.assert_close(log_q.exp(), expected / expected.sum(dim=1, keepdim=True))
    exact = gradient(-(log_q.exp() * rewards).sum())
    draws = 200_000 // samples
    chosen = torch.multinomial(log_q.detach().exp(), draws * samples, replacement=True).view(2, draws, samples)
    # The surrogate is linear in log q of the samples, so the mean over many draws is one weighted sum of gradients.
    log_q = retriever(sentences, templates, own)
    total = 0.0
    for row in range(2):
        picked = log_q[row].expand(draws, -1).gather(1, chosen[row])
        total = total + reinforce_loss(picked, rewards[row].expand(draws, -1).gather(1, chosen[row])).mean()
    estimate = gradient(total)
    tolerance = (0.1 if samples == 1 else 0.05) * float(exact.abs().max())
    torch.testing.assert_close(estimate, exact, atol=tolerance, rtol=0)


def test_the_baseline_of_others_is_unbiased_exactly():
    """All 25 pairs of two samples, each with its probability: no Monte Carlo."""
    torch.manual_seed(4)
    scores = torch.randn(5, dtype=torch.float64, requires_grad=True)
    rewards = torch.randn(5, dtype=torch.float64)
    log_q = scores.log_softmax(0)
    (exact,) = torch.autograd.grad(-(log_q.exp() * rewards).sum(), scores)
    log_q = scores.log_softmax(0)
    pairs = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    weights = log_q.detach().exp()[pairs].prod(dim=1)
    (ours,) = torch.autograd.grad((weights * reinforce_loss(log_q[pairs], rewards[pairs])).sum(), scores)
    torch.testing.assert_close(ours, exact)


def test_rescaling_spreads_the_mass():
    torch.manual_seed(5)
    for scale in (0.1, 10.0):
        embeddings = scale * torch.nn.functional.normalize(torch.randn(300, 8), dim=1)
        retriever = Retriever(8)
        retriever.rescale(embeddings, 20.0)
        rows = torch.linspace(0, 299, 256).long()
        log_q = retriever(embeddings[rows], embeddings, rows).detach()
        entropy = -(log_q.exp() * log_q.clamp(min=-100)).sum(dim=1).mean()
        assert float(entropy.exp()) == pytest.approx(20, rel=0.02)
