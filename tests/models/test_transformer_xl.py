"""Transformer-XL as a network: attention, memory, causality."""

import numpy as np
import torch
from networks import decoder, random_tokens

from fairseq_knnlm.models.relative_attention import RelativeAttention, future_positions, relative_positions


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
