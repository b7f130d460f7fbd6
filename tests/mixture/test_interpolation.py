"""The mixture of the LM and its memories."""

import math

import numpy as np
import torch
from reference import mixture

from fairseq_knnlm.mixture.interpolation import LOG_ZERO, interpolate


def test_interpolation_of_two_stores():
    lm, first, second = (torch.log(torch.tensor(p)) for p in ([0.5, 0.1], [0.2, 0.0], [0.9, 0.3]))
    ours = interpolate(lm, [first, second], [0.25, 0.5])
    expected = mixture(lm.numpy(), [first.exp().numpy(), second.exp().numpy()], [0.25, 0.5])
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_lambda_zero_is_the_lm_to_the_bit():
    lm = torch.randn(100)
    assert torch.equal(interpolate(lm, [torch.randn(100)], [0.0]), lm)


def test_never_infinite():
    """Stock eval_lm would drop an infinite score from the count."""
    ours = interpolate(torch.tensor([-1.0]), [torch.tensor([-math.inf])], [1.0])
    assert ours.item() == LOG_ZERO and math.isfinite(ours.item())
