"""The continuous cache against a token-by-token loop."""

import numpy as np
import pytest
import torch
from reference import cache_probability

from fairseq_knnlm.memory.cache import ContinuousCache, Documents


def random_text(count=300, dim=8, vocabulary=12, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, dim)).astype(np.float32), rng.integers(0, vocabulary, count)


def cached(cache, states, tokens, cuts=()):
    """log p_cache of a text that comes in pieces."""
    pieces = zip(np.split(states, cuts), np.split(tokens, cuts))
    return torch.cat([cache.target_log_probs(torch.from_numpy(s), torch.from_numpy(t)) for s, t in pieces]).numpy()


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
@pytest.mark.parametrize("theta", [0.0, 0.3, 5.0])
def test_against_the_loop(size, theta):
    states, tokens = random_text()
    expected = cache_probability(states, tokens, size, theta)
    np.testing.assert_allclose(np.exp(cached(ContinuousCache(size, theta), states, tokens)), expected, atol=1e-5)


@pytest.mark.parametrize("cuts", [[1], [100, 103, 250], list(range(1, 300))])
def test_any_cut_gives_the_same(cuts):
    states, tokens = random_text()
    whole = cached(ContinuousCache(50, 0.5), states, tokens)
    np.testing.assert_allclose(cached(ContinuousCache(50, 0.5), states, tokens, cuts), whole, atol=1e-5)


def test_the_future_changes_nothing():
    states, tokens = random_text()
    before = cached(ContinuousCache(50, 0.5), states, tokens)
    states[200:], tokens[200:] = 9.0, 1
    after = cached(ContinuousCache(50, 0.5), states, tokens)
    np.testing.assert_array_equal(after[:200], before[:200])
    np.testing.assert_allclose(np.exp(after), cache_probability(states, tokens, 50, 0.5), atol=1e-5)


def test_documents():
    """Lines of 4, 2, 3, 1, 5 tokens; the second and the fourth begin documents."""
    documents = Documents(np.array([4, 2, 3, 1, 5]), np.array([False, True, False, True, False]))
    starts = documents.start_of(np.arange(15))
    # The title's own tokens (4, 5 and 9) are not known to be one until they have been read.
    np.testing.assert_array_equal(starts, [0] * 6 + [4] * 4 + [9] * 5)
    states, tokens = random_text(15, vocabulary=3)
    expected = cache_probability(states, tokens, 6, 0.5, starts)
    ours = cached(ContinuousCache(6, 0.5, documents), states, tokens, [3, 8])
    np.testing.assert_allclose(np.exp(ours), expected, atol=1e-5)


def vocabulary_probability(states, tokens, size, theta, query, vocabulary, starts=None):
    """p_cache of every token after a text, by the loop: each in turn is appended to the text."""
    states = np.concatenate([states, query[None]])
    each = [cache_probability(states, np.append(tokens, y), size, theta, starts)[-1] for y in range(vocabulary)]
    return np.array(each)


@pytest.mark.parametrize(("size", "theta"), [(1, 0.3), (7, 5.0), (64, 0.3), (1000, 0.0)])
def test_the_whole_vocabulary_against_the_loop(size, theta):
    """Wherever in the text, for several queries at once; and looking ahead changes nothing that follows."""
    states, tokens = random_text(120)
    queries = np.random.default_rng(5).normal(size=(3, 8)).astype(np.float32)
    cache, looked = ContinuousCache(size, theta), ContinuousCache(size, theta)
    assert (cache.vocabulary_log_probs(torch.from_numpy(queries), 12) == -np.inf).all()  # nothing has been read
    for start in range(0, 120, 40):
        part = slice(start, start + 40)
        arguments = torch.from_numpy(states[part]), torch.from_numpy(tokens[part])
        cache.target_log_probs(*arguments)
        ours = cache.vocabulary_log_probs(torch.from_numpy(queries), 12).exp().numpy()
        before = states[: part.stop], tokens[: part.stop], size, theta
        expected = [vocabulary_probability(*before, query, 12) for query in queries]
        np.testing.assert_allclose(ours, expected, atol=1e-5)
        np.testing.assert_allclose(ours.sum(axis=1), 1, atol=1e-5)
        looked.target_log_probs(*arguments)
    following = torch.from_numpy(queries), torch.tensor([3, 1, 3])
    torch.testing.assert_close(cache.target_log_probs(*following), looked.target_log_probs(*following))


def test_the_whole_vocabulary_within_a_document():
    """Lines of 4, 2, 3 and 6 tokens; the second begins a document, which is known once it has been read."""
    documents = Documents(np.array([4, 2, 3, 6]), np.array([False, True, False, False]))
    states, tokens = random_text(15, vocabulary=5)
    for count in (5, 6, 9):
        cache = ContinuousCache(8, 0.5, documents)
        cached(cache, states[:count], tokens[:count])
        ours = cache.vocabulary_log_probs(torch.from_numpy(states[count : count + 1]), 5)[0].exp()
        starts = documents.start_of(np.arange(count + 1))
        expected = vocabulary_probability(states[:count], tokens[:count], 8, 0.5, states[count], 5, starts)
        np.testing.assert_allclose(ours, expected, atol=1e-5)
