"""fairseq-eval-lm with the continuous cache, against a token-by-token loop."""

import numpy as np
import pytest
from reference import cache_probability, load, mixture

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.memory.cache import Documents

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
    starts = Documents(sizes, np.array([line == lines[40] for line in lines])).start_of(np.arange(sizes.sum()))
    expected = mixture(base.scores, [cache_probability(keys, values, 100, 0.05, starts)], [0.3])
    literal = evaluate(corpus, adaptive_model, *CACHE, "--knn-cache-boundary", lines[40])
    np.testing.assert_allclose(literal.scores, expected, atol=1e-4)
