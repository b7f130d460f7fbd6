"""The continuous cache against a token-by-token loop."""

import numpy as np
import pytest
import torch
from reference import cache_probability, load, mixture

from fairseq_knnlm.cache import ContinuousCache, Documents
from fairseq_knnlm.datastore import Datastore


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
    assert (after[200:] != before[200:]).any()


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


CACHE = ["--knn-cache-size", "100", "--knn-cache-lambda", "0.3", "--knn-cache-theta", "0.05"]


@pytest.mark.parametrize("key", ["ffn_input_ln", "attn_input"])
def test_lm_with_cache(evaluate, dump, corpus, adaptive_model, key):
    base = evaluate(corpus, adaptive_model)
    keys, values = load(Datastore(dump("valid", "--knn-key", key, "--knn-key-dtype", "float32")))
    probability = cache_probability(keys, values, 100, 0.05)
    ours = evaluate(corpus, adaptive_model, *CACHE, "--knn-key", key)
    np.testing.assert_allclose(ours.scores, mixture(base.scores, [probability], [0.3]), atol=1e-4)
    assert "in the cache" in ours.log


def test_same_for_every_batch_size_and_part(evaluate, corpus, adaptive_model):
    whole = evaluate(corpus, adaptive_model, *CACHE)
    small = evaluate(corpus, adaptive_model, *CACHE, "--max-tokens", "64")
    np.testing.assert_allclose(small.scores, whole.scores, atol=1e-5)
    parts = [
        evaluate(corpus, adaptive_model, *CACHE, "--num-shards", "3", "--shard-id", part).scores for part in "012"
    ]
    np.testing.assert_allclose(np.concatenate(parts), whole.scores, atol=1e-5)


def test_cache_with_datastore(evaluate, dump, corpus, adaptive_model):
    knn = ["--knn-datastore", dump("train"), "--knn-lambda", "0.2", "--knn-temperature", "5"]
    both = evaluate(corpus, adaptive_model, *knn, *CACHE)
    base = evaluate(corpus, adaptive_model)
    first = evaluate(corpus, adaptive_model, *knn)
    second = evaluate(corpus, adaptive_model, *CACHE)
    knn_part = np.exp(first.scores) - 0.8 * np.exp(base.scores)
    cache_part = np.exp(second.scores) - 0.7 * np.exp(base.scores)
    expected = np.log(0.5 * np.exp(base.scores) + knn_part + cache_part)
    np.testing.assert_allclose(both.scores, expected, atol=1e-3)


def test_boundary(evaluate, dump, corpus, adaptive_model):
    """A document begins at every line that starts with w1, by the regular expression."""
    lines = (corpus.parent / "valid.txt").read_text().splitlines()
    sizes = np.array([len(line.split()) + 1 for line in lines])
    is_boundary = np.array([line.startswith("w1") for line in lines])
    assert is_boundary.any()
    starts = Documents(sizes, is_boundary).start_of(np.arange(sizes.sum()))
    keys, values = load(Datastore(dump("valid", "--knn-key-dtype", "float32")))
    base = evaluate(corpus, adaptive_model)
    expected = mixture(base.scores, [cache_probability(keys, values, 100, 0.05, starts)], [0.3])
    ours = evaluate(corpus, adaptive_model, *CACHE, "--knn-cache-boundary", "re:w1.*")
    np.testing.assert_allclose(ours.scores, expected, atol=1e-4)
    flags = [*CACHE, "--knn-cache-boundary", "re:w1.*", "--num-shards", "2"]
    parts = [evaluate(corpus, adaptive_model, *flags, "--shard-id", part) for part in "01"]
    np.testing.assert_allclose(np.concatenate([part.scores for part in parts]), expected, atol=1e-4)
    literal = evaluate(corpus, adaptive_model, *CACHE, "--knn-cache-boundary", lines[40])
    assert literal.loss != ours.loss
