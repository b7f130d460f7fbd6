"""Transformer-XL and SPALM as networks: memory, causality, gate, lanes, search for neighbours."""

import numpy as np
import pytest
import torch
from test_index import make_store

from fairseq_knnlm.search import ExactSearch
from fairseq_knnlm.spalm.attention import RelativeAttention, future_positions, relative_positions
from fairseq_knnlm.spalm.lanes import LaneDataset
from fairseq_knnlm.spalm.model import SPALMConfig, SPALMDecoder
from fairseq_knnlm.spalm.neighbors import search_outside
from fairseq_knnlm.spalm.transformer_xl import TransformerXLConfig, TransformerXLDecoder


class Dictionary:
    """Just enough of fairseq's."""

    def __len__(self):
        return 40

    def pad(self):
        return 1

    def eos(self):
        return 2


def decoder(kind=TransformerXLDecoder, config=TransformerXLConfig, **settings):
    torch.manual_seed(0)
    settings = {"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 32, "dropout": 0.0, "memory_size": 100, **settings}
    model = kind(config(**settings), Dictionary()).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def random_tokens(rows, length, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(4, 40, (rows, length)))


def test_attention_against_a_loop():
    torch.manual_seed(0)
    batch, length, past, dim, heads = 2, 5, 3, 8, 2
    attention = RelativeAttention(dim, heads, 0.0)
    torch.nn.init.normal_(attention.content_bias)
    torch.nn.init.normal_(attention.position_bias)
    states, memory = torch.randn(batch, length, dim), torch.randn(batch, past, dim)
    positions = relative_positions(past + length, dim, states.device)
    ours = attention(states, memory, positions, future_positions(length, states.device))
    context = torch.cat([memory, states], dim=1)
    keys, values = (part.view(batch, -1, heads, dim // heads) for part in attention.key_value(context).chunk(2, -1))
    queries = attention.query(states).view(batch, length, heads, -1)
    by_distance = attention.position(positions).view(-1, heads, dim // heads).flip(0)
    expected = torch.zeros(batch, length, heads, dim // heads)
    for b, h, i in np.ndindex(batch, heads, length):
        scores = [
            (queries[b, i, h] + attention.content_bias[h]) @ keys[b, j, h]
            + (queries[b, i, h] + attention.position_bias[h]) @ by_distance[past + i - j, h]
            for j in range(past + i + 1)
        ]
        weights = (torch.stack(scores) / (dim / heads) ** 0.5).softmax(0)
        expected[b, i, h] = weights @ values[b, : past + i + 1, h]
    torch.testing.assert_close(ours, attention.output(expected.flatten(2)))


def test_segments_with_memory_equal_one_long_segment():
    model, tokens = decoder(), random_tokens(3, 30)
    with torch.no_grad():
        whole, _ = model(tokens)
        cuts = [7, 8, 20]
        parts = [model(part, text="valid", step=step)[0] for step, part in enumerate(tokens.tensor_split(cuts, dim=1))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=1e-4)


def test_memory_is_as_long_as_it_says():
    """With M = 4 the fifth state back is out of sight, layer by layer."""
    model, tokens = decoder(memory_size=4, layers=1), random_tokens(1, 12)
    with torch.no_grad():
        model(tokens[:, :8], text="valid", step=0)
        first = model(tokens[:, 8:], text="valid", step=1)[0]
        changed = tokens.clone()
        changed[:, :4] = 5
        model(changed[:, :8], text="valid", step=0)
        torch.testing.assert_close(model(changed[:, 8:], text="valid", step=1)[0], first)
        changed[:, 4] = 5
        model(changed[:, :8], text="valid", step=0)
        assert not torch.allclose(model(changed[:, 8:], text="valid", step=1)[0], first)


def test_causality():
    model, tokens = decoder(), random_tokens(2, 10)
    later = tokens.clone()
    later[:, 6:] = 9
    with torch.no_grad():
        torch.testing.assert_close(model(later)[0][:, :6], model(tokens)[0][:, :6])


def test_memory_resets_and_does_not_leak():
    model, tokens = decoder(), random_tokens(2, 8)
    with torch.no_grad():
        fresh = model(tokens, text="train", step=0)[0]
        model(tokens, text="train", step=1)
        torch.testing.assert_close(model(tokens, text="train", step=0)[0], fresh)  # a new epoch
        torch.testing.assert_close(model(tokens, text="valid", step=0)[0], fresh)  # another split
        after = model(tokens, text="train", step=1)[0]  # which did not disturb this one
        model(tokens, text="train", step=0)
        torch.testing.assert_close(model(tokens, text="train", step=1)[0], after)
        torch.testing.assert_close(model(tokens, text="train", step=7)[0], fresh)  # not the next segment
        # lanes do not see each other
        model(tokens, text="a", step=0)
        both = model(tokens, text="a", step=1)[0]
        model(tokens[:1], text="b", step=0)
        torch.testing.assert_close(model(tokens[:1], text="b", step=1)[0], both[:1])


def test_no_gradient_into_the_memory():
    model, tokens = decoder().train(), random_tokens(1, 6)
    seen = []
    model.embed_tokens.register_forward_hook(lambda _, __, output: (output.retain_grad(), seen.append(output))[1])
    model(tokens, text="train", step=0)
    model(tokens, text="train", step=1)[0].sum().backward()
    assert seen[0].grad is None and seen[1].grad is not None


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


@pytest.mark.parametrize("lanes, length, shards", [(1, 7, 1), (3, 5, 1), (4, 8, 2), (50, 3, 1)])
def test_every_token_once_and_in_order(lanes, length, shards):
    tokens = np.arange(4, 104)
    dataset = LaneDataset("train", tokens, Dictionary(), lanes, length, shards=shards)
    rows: dict[int, list[int]] = {lane: [] for lane in range(lanes)}
    for number, batch in enumerate(dataset.batches()):
        sample = dataset.collater([dataset[index] for index in batch])
        assert sample["net_input"]["step"] == number // shards
        for index, source, target in zip(batch, sample["net_input"]["src_tokens"], sample["target"]):
            target = target[target != 1].tolist()
            source = source[: len(target)].tolist()
            assert source == [token - 1 if token > 4 else 2 for token in target]
            rows[index % lanes] += target
    assert [token for lane in range(lanes) for token in rows[lane]] == tokens.tolist()


@pytest.mark.parametrize("window", [0, 3, 50])
def test_neighbours_outside_the_window(tmp_path, window):
    store = make_store(tmp_path / "store", 600)
    keys = np.concatenate(list(store.key_blocks())).astype(np.float32)
    positions = np.arange(0, 600, 7)
    distances, ids = search_outside(ExactSearch(store, "l2"), keys[positions], 4, positions, window)
    for row, position in enumerate(positions):
        allowed = np.flatnonzero(np.abs(np.arange(600) - position) > window)
        exact = ((keys[allowed] - keys[position]) ** 2).sum(axis=1)
        np.testing.assert_allclose(distances[row], np.sort(exact)[:4], rtol=1e-4, atol=1e-4)
        assert (np.abs(ids[row] - position) > window).all()


def test_gate_at_one_is_the_transformer_xl():
    model = decoder(SPALMDecoder, SPALMConfig, neighbors_used=3, gate="scalar")
    tokens, neighbors = random_tokens(2, 5), random_tokens(2, 15, seed=1).view(2, 5, 3)
    with torch.no_grad():
        states = TransformerXLDecoder.extract_features(model, tokens)
        model.gate.register_forward_hook(lambda _, __, output: torch.full_like(output, 1e4))
        torch.testing.assert_close(model.extract_features(tokens, neighbors=neighbors), states, atol=1e-6, rtol=0)
