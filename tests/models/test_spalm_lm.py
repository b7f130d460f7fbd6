"""SPALM as a network: its gate."""

from argparse import Namespace

import numpy as np
import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY
from networks import Dictionary, decoder, random_tokens

from fairseq_knnlm.errors import KnnlmError
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
@pytest.mark.parametrize("total", ["plain", "scaled", "norm"])
@pytest.mark.parametrize("bias", [None, 1.5])
def test_gate_against_the_equations(gate, total, bias):
    model = decoder(SPALMDecoder, SPALMConfig, neighbors_used=3, gate=gate, neighbor_sum=total, gate_bias=bias)
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
        if total == "scaled":
            m = m * np.sqrt(len(h))
        if total == "norm":
            m = (m - m.mean()) / np.sqrt(m.var() + 1e-5)
        g = 1 / (1 + np.exp(-gate_weight @ h - (bias or 0)))
        np.testing.assert_allclose(gates[b, t], g, rtol=1e-5)
        np.testing.assert_allclose(ours[b, t], (1 - g) * m + g * h, rtol=1e-4, atol=1e-5)


def test_gate_at_one_is_the_transformer_xl():
    model = decoder(SPALMDecoder, SPALMConfig, neighbors_used=3, gate="scalar")
    tokens, neighbors = random_tokens(2, 5), random_tokens(2, 15, seed=1).view(2, 5, 3)
    with torch.no_grad():
        states = TransformerXLDecoder.extract_features(model, tokens)
        model.gate.register_forward_hook(lambda _, __, output: torch.full_like(output, 1e4))
        torch.testing.assert_close(model.extract_features(tokens, neighbors=neighbors), states, atol=1e-6, rtol=0)


def test_neighbour_dropout_in_training_alone():
    """Each neighbour is left out so often, as if it had not been retrieved; where all are, m is zero."""
    model = decoder(SPALMDecoder, SPALMConfig, neighbors_used=4, neighbor_dropout=0.3, dropout=0.0)
    states, neighbors = torch.randn(50, 40, 16), random_tokens(50, 160, seed=1).view(50, 40, 4)
    with torch.no_grad():
        _, shares = model.eval().read_neighbors(states, neighbors)
        assert (shares > 0).all()
        memory, shares = model.train().read_neighbors(states, neighbors)
        kept = shares > 0
        assert kept.float().mean().item() == pytest.approx(0.7, abs=0.02)
        none = ~kept.any(dim=-1)
        assert none.float().mean().item() == pytest.approx(0.3**4, abs=0.01) and (memory[none] == 0).all()
        expected, _ = model.eval().read_neighbors(states, neighbors.masked_fill(~kept, -1))
    torch.testing.assert_close(memory, expected)
    with pytest.raises(KnnlmError, match="--neighbor-dropout must be"):
        decoder(SPALMDecoder, SPALMConfig, neighbor_dropout=1.0)


@pytest.mark.parametrize("cutoffs", [None, "10,20"])
def test_long_embeddings(cutoffs):
    """They begin longer, and what the layers read of them is the same."""
    sizes = {"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 32, "dropout": 0.0, "adaptive_cutoff": cutoffs}
    models = []
    for length in (1.0, 4.0):
        torch.manual_seed(0)
        models.append(SPALMDecoder(SPALMConfig(**sizes, embedding_length=length), Dictionary()).eval())
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        short, long = (model.embed_tokens(tokens) for model in models)
        torch.testing.assert_close(long, 4 * short)
        torch.testing.assert_close(*(TransformerXLDecoder.extract_features(model, tokens) for model in models))


def test_defaults_are_the_literal_equation():
    """The paper's names have no option; the name for small budgets has some."""
    for name in ("wiki103", "enwik8", "small_budget"):
        args = Namespace()
        ARCH_CONFIG_REGISTRY[f"spalm_lm_{name}"](args)
        options = {option for option in ("neighbor_sum", "gate_bias", "embedding_length") if hasattr(args, option)}
        assert bool(options) == (name == "small_budget")
    assert (SPALMConfig().neighbor_sum, SPALMConfig().gate_bias, SPALMConfig().embedding_length) == ("plain", None, 1.0)
