"""The n-gram LM of examples/papers, against plain Python."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples/papers"))
from ngram import KneserNey

VOCABULARY = 9


def plain_kneser_ney(tokens: list[int], order: int):
    """p(word, history), by the formula."""
    tables = {order: Counter(tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1))}
    for lower in range(order - 1, 0, -1):
        tables[lower] = Counter(gram[1:] for gram in tables[lower + 1])

    def probability(word: int, history: tuple) -> float:
        if len(history) == order:
            history = history[1:]
        table = tables[len(history) + 1]
        shorter = probability(word, history[1:]) if history else 1 / VOCABULARY
        follow = {gram: count for gram, count in table.items() if gram[:-1] == history}
        if not follow:
            return shorter
        once, twice = (sum(count == n for count in table.values()) for n in (1, 2))
        discount = once / (once + 2 * twice) if once else 0.5
        kept = max(table[(*history, word)] - discount, 0)
        return (kept + discount * len(follow) * shorter) / sum(follow.values())

    return probability


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_against_plain_python(order):
    rng = np.random.default_rng(order)
    train, text = rng.zipf(1.5, 400) % 7, rng.integers(0, VOCABULARY, 60)  # two types are never seen in training
    probability = plain_kneser_ney(train.tolist(), order)
    expected = [
        np.log(probability(int(text[i]), tuple(text[max(0, i - order + 1) : i].tolist()))) for i in range(len(text))
    ]
    model = KneserNey(train, order, VOCABULARY)
    np.testing.assert_allclose(model.log_probs(text), expected, rtol=1e-9)
    everything = [np.exp(model.log_probs(np.append(text[:10], word))[-1]) for word in range(VOCABULARY)]
    assert sum(everything) == pytest.approx(1)
