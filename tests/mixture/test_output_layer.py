"""Tokens of the LM's distribution other than the target, against all of it."""

import numpy as np
import pytest
import torch
from commands import eval_lm_here, sentence_of
from fairseq import checkpoint_utils

from fairseq_knnlm.mixture.output_layer import all_log_probs, log_probs_of, top_tokens
from fairseq_knnlm.saved_runs.format import SavePart, bytes_per_token
from fairseq_knnlm.saved_runs.scores import SavedScores


@pytest.fixture(scope="module")
def decoders(adaptive_model, plain_model) -> dict:
    models, _ = checkpoint_utils.load_model_ensemble([str(adaptive_model), str(plain_model)])
    return dict(zip(("adaptive", "plain"), (model.eval().decoder for model in models)))


@pytest.fixture
def features() -> torch.Tensor:
    return torch.randn(40, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["adaptive", "plain"])
def test_any_tokens(decoders, features, kind):
    """In the head and in both tails, some twice; some rows need no tail at all."""
    decoder = decoders[kind]
    tokens = torch.randint(4, 208, (40, 9), generator=torch.Generator().manual_seed(2))
    tokens[:, :4] = torch.tensor([49, 50, 119, 120])  # the edges of the bands
    tokens[0] = 7
    with torch.no_grad():
        expected = all_log_probs(decoder, features).gather(1, tokens)
        np.testing.assert_allclose(expected.exp().sum(), expected.double().exp().sum(), rtol=1e-5)
        np.testing.assert_allclose(log_probs_of(decoder, features, tokens), expected, atol=1e-5)
        np.testing.assert_allclose(all_log_probs(decoder, features).exp().sum(dim=1), 1, atol=1e-5)


@pytest.mark.parametrize("rows", [None, 7])
def test_most_probable_tokens_of_two_models(decoders, features, rows):
    with torch.no_grad():
        mean = sum(all_log_probs(decoder, features).double().exp() for decoder in decoders.values()) / 2
        ours = top_tokens([*decoders.values()], [features, features], 5, rows)
    expected = mean.topk(5, dim=1)
    np.testing.assert_array_equal(ours.tokens, expected.indices)
    np.testing.assert_allclose(ours.probs.float(), expected.values, rtol=1e-3)


def test_saved(corpus, adaptive_model, evaluate, tmp_path):
    """A save holds them beside its scores, of all parts of a run, for few bytes."""
    whole = evaluate(corpus, adaptive_model, "--knn-save", tmp_path / "save", "--knn-save-top", 6)
    assert "saving 44 bytes per token" in whole.log  # 4 of score and token each, 12 of features, 6 times 2 + 2
    part = SavePart.open(tmp_path / "save")
    assert bytes_per_token(part.run) == 44 and part.run.top == 6
    tokens, probs = part.arrays["top.tokens"], part.arrays["top.probs"].astype(np.float64)
    assert tokens.dtype == np.uint16 and (np.diff(probs, axis=1) <= 0).all() and (probs.sum(axis=1) < 1.001).all()
    is_target = tokens == part.arrays["tokens"][:, None]
    found = is_target.any(axis=1)
    assert 0.1 < found.mean() < 1
    np.testing.assert_allclose(probs[is_target], np.exp(part.arrays["lm"][found]), rtol=1e-3)
    np.testing.assert_array_equal(np.exp(part.arrays["lm"][~found]) <= probs[~found, -1] * 1.001, True)
    halves = [tmp_path / f"half{number}" for number in (0, 1)]
    for number, half in enumerate(halves):
        shards = ["--num-shards", 2, "--shard-id", number]
        evaluate(corpus, adaptive_model, "--knn-save", half, "--knn-save-top", 6, *shards)
    saved = SavedScores.open(halves)
    np.testing.assert_array_equal(np.concatenate([half.arrays["top.tokens"] for half in saved.parts]), tokens)


def test_refused(corpus, adaptive_model, tmp_path):
    command = [eval_lm_here, corpus, adaptive_model, "--gen-subset", "valid"]
    assert "does nothing without --knn-save" in sentence_of(*command, "--knn-save-top", 4)
    save = ["--knn-save", tmp_path / "save"]
    for count in (-1, 209):
        assert "between 0 and the 208 types" in sentence_of(*command, *save, "--knn-save-top", count)
    assert not (tmp_path / "save").exists()
    assert "are for scoring" in sentence_of(*command, "--knn-dump", tmp_path / "store", "--knn-save-top", 4)
