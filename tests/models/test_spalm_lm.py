"""SPALM as a network: its gate."""

import numpy as np
import pytest
import torch
from networks import decoder, random_tokens

from fairseq_knnlm.models.spalm_lm import SPALMConfig, SPALMDecoder
from fairseq_knnlm.models.transformer_xl import TransformerXLDecoder


def test_k_zero_is_the_transformer_xl():
    plain = decoder()
    spalm = decoder(SPALMDecoder, SPALMConfig, neighbors_used=0)
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in spalm.named_parameters()]
    spalm.load_state_dict(plain.state_dict())
    tokens = random_tokens(2, 9)
    assert torch.equal(plain(tokens)[0], spalm(tokens)[0])


@pytest.mark.parametrize("gate", ["vector", "scalar"])
def test_gate_against_the_equations(gate):
    model = decoder(SPALMDecoder, SPALMConfig, neighbors_used=3, gate=gate)
    tokens, neighbors = random_tokens(2, 5), random_tokens(2, 20, seed=1).view(2, 5, 4).clone()
    neighbors[0, 0] = -1  # none
    neighbors[0, 1, 2] = -1
    with torch.no_grad():
        ours = model.extract_features(tokens, neighbors=neighbors).numpy()
        states = TransformerXLDecoder.extract_features(model, tokens).double().numpy()
        gates = model.gate_values(torch.from_numpy(states).float()).numpy()
    embeddings, gate_weight = (module.weight.detach().double().numpy() for module in (model.embed_tokens, model.gate))
    for b, t in np.ndindex(2, 5):
        h = states[b, t]
        y = embeddings[[token for token in neighbors[b, t, :3] if token >= 0]]  # (K, C)
        shares = np.exp(y @ h) / np.exp(y @ h).sum()
        m = shares @ y  # zeros where there is no neighbour
        g = 1 / (1 + np.exp(-gate_weight @ h))
        np.testing.assert_allclose(gates[b, t], g, rtol=1e-5)
        np.testing.assert_allclose(ours[b, t], (1 - g) * m + g * h, rtol=1e-4, atol=1e-5)


def test_gate_at_one_is_the_transformer_xl():
    model = decoder(SPALMDecoder, SPALMConfig, neighbors_used=3, gate="scalar")
    tokens, neighbors = random_tokens(2, 5), random_tokens(2, 15, seed=1).view(2, 5, 3)
    with torch.no_grad():
        states = TransformerXLDecoder.extract_features(model, tokens)
        model.gate.register_forward_hook(lambda _, __, output: torch.full_like(output, 1e4))
        torch.testing.assert_close(model.extract_features(tokens, neighbors=neighbors), states, atol=1e-6, rtol=0)
