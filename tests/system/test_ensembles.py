"""Several checkpoints as one LM: the numbers of fairseq's own scorer, with datastores of any of them."""

import json

import numpy as np
import pytest
import torch
from commands import eval_lm_here, knnlm, sentence_of
from fairseq import checkpoint_utils
from fairseq.sequence_scorer import SequenceScorer
from reference import SAME_SCORES, knn_probability, load, mixture

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.memory.opening import _number_of_owner
from fairseq_knnlm.mixture.interpolation import log_mean
from fairseq_knnlm.saved_runs.scores import SavedScores

K, TEMPERATURE = 16, 20.0
KNN = ["--knn-k", K, "--knn-temperature", TEMPERATURE, "--knn-index", "flat"]


@pytest.fixture(scope="module")
def both(adaptive_model, plain_model) -> str:
    """A model with an adaptive and one with a plain softmax."""
    return f"{adaptive_model}:{plain_model}"


@pytest.fixture
def queries(dump, adaptive_model, plain_model) -> dict:
    """States of valid by each of the models, and their own train."""
    return {
        model: [dump(split, "--knn-key-dtype", "float32", model=model) for split in ("valid", "train")]
        for model in (adaptive_model, plain_model)
    }


def lm_scores(evaluate, corpus, *models) -> np.ndarray:
    """The log of the mean of the models' probabilities, each scored alone: (n,)."""
    return np.log(np.mean([np.exp(evaluate(corpus, model).scores) for model in models], axis=0))


def knn_scores(queries, store) -> np.ndarray:
    """p_kNN of the tokens whose states ``queries`` holds, by brute force."""
    keys, targets = load(Datastore(queries))
    return knn_probability(keys, targets, *load(Datastore(store)), K, TEMPERATURE)


def test_without_flags_as_fairseq_averages(evaluate, corpus, both, adaptive_model, plain_model, monkeypatch):
    ours = evaluate(corpus, both)
    # The stock eval_lm takes a:b for one file, though its scorer averages models: so it is given both.
    load_models = checkpoint_utils.load_model_ensemble_and_task

    def load_both(paths, *args, **kwargs):
        return load_models([str(adaptive_model), str(plain_model)], *args, **kwargs)

    monkeypatch.setattr(checkpoint_utils, "load_model_ensemble_and_task", load_both)
    stock = evaluate(corpus, "both", stock=True)
    assert ours.loss == pytest.approx(stock.loss, abs=1e-6)
    np.testing.assert_allclose(ours.scores, stock.scores, atol=SAME_SCORES)


def test_the_stock_scorer_is_back_afterwards(evaluate, corpus, both, adaptive_model):
    """What is installed for one evaluation is gone in the next."""
    from fairseq_cli import eval_lm

    evaluate(corpus, both)
    assert eval_lm.checkpoint_utils is checkpoint_utils and eval_lm.SequenceScorer is SequenceScorer
    alone = evaluate(corpus, adaptive_model)
    np.testing.assert_allclose(alone.scores, evaluate(corpus, adaptive_model, stock=True).scores, atol=SAME_SCORES)


@pytest.mark.parametrize("owner", [0, 1])
def test_a_datastore_of_either_model(evaluate, corpus, both, adaptive_model, plain_model, queries, owner):
    model = (adaptive_model, plain_model)[owner]
    valid, store = queries[model]
    ours = evaluate(corpus, both, "--knn-datastore", store, "--knn-lambda", "0.4", *KNN)
    assert f"holds keys of checkpoint {owner + 1} of the 2 of --path" in ours.log
    expected = mixture(lm_scores(evaluate, corpus, adaptive_model, plain_model), [knn_scores(valid, store)], [0.4])
    np.testing.assert_allclose(ours.scores, expected, atol=2e-4)


def test_a_datastore_of_each_and_the_cache(evaluate, corpus, both, adaptive_model, plain_model, queries, tmp_path):
    """Saved, the mixture is what was scored; tuned, what the flags give."""
    stores = [queries[model][1] for model in (adaptive_model, plain_model)]
    memories = ["--knn-datastore", ",".join(map(str, stores)), *KNN]
    flags = [*memories, "--knn-lambda", "0.2,0.3", "--knn-cache-size", 50, "--knn-cache-lambda", "0.1"]
    ours = evaluate(corpus, both, *flags, "--knn-save", tmp_path / "save")
    saved = SavedScores.open([tmp_path / "save"])
    np.testing.assert_allclose(saved.lm, lm_scores(evaluate, corpus, adaptive_model, plain_model), atol=1e-5)
    parts = [np.exp(saved.scores(f"knn{number}", K, 1 / TEMPERATURE).log_probs) for number in (0, 1)]
    for model, p in zip((adaptive_model, plain_model), parts):
        np.testing.assert_allclose(p, knn_scores(*queries[model]), atol=1e-3)
    cache = saved.cache
    parts.append(np.exp(saved.scores("cache", cache.neighbors, cache.sharpness).log_probs))
    np.testing.assert_allclose(ours.scores, mixture(saved.lm, parts, [0.2, 0.3, 0.1]), atol=1e-3)


def test_tuned_flags_give_what_tune_promises(evaluate, corpus, both, queries, plain_model, tmp_path, capsys):
    store = queries[plain_model][1]
    evaluate(corpus, both, "--knn-datastore", store, *KNN, "--knn-save", tmp_path / "save")
    assert knnlm("tune", tmp_path / "save", "--json") == 0
    tuned = json.loads(capsys.readouterr().out)
    again = evaluate(corpus, both, "--knn-datastore", store, "--knn-index", "flat", *tuned["flags"].split())
    assert 2**again.loss == pytest.approx(tuned["results"]["valid, tuned on it"]["mixture"], rel=1e-4)


def test_threads_change_nothing(evaluate, corpus, both, threads):
    assert evaluate(corpus, both).loss == pytest.approx(evaluate(corpus, both, "--max-tokens", 100).loss, abs=1e-5)


def test_same_model_twice_is_the_model(evaluate, corpus, plain_model):
    twice = evaluate(corpus, f"{plain_model}:{plain_model}")
    np.testing.assert_allclose(twice.scores, evaluate(corpus, plain_model).scores, atol=SAME_SCORES)


def test_refused(corpus, adaptive_model, plain_model, post_norm_model, both, dump, tmp_path):
    dumping = ["--gen-subset", "train", "--knn-dump", tmp_path / "store"]
    assert "--path names 2; give --path only one" in sentence_of(eval_lm_here, corpus, both, *dumping)
    assert not (tmp_path / "store").exists()
    foreign = f"{plain_model}:{post_norm_model}"
    error = sentence_of(eval_lm_here, corpus, foreign, "--gen-subset", "valid", "--knn-datastore", dump("train"))
    assert "was made with none of the 2 checkpoints of --path" in error
    with pytest.raises(OSError, match=r"Model file not found: .*missing\.pt"):
        eval_lm_here(corpus, f"{plain_model}:{tmp_path / 'missing.pt'}", "--gen-subset", "valid")


def test_a_datastore_that_does_not_say_whose_it_is(dump):
    store = Datastore(dump("train"))
    store.manifest.source.pop("checkpoint_sha256")
    assert "does not say which checkpoint made it" in sentence_of(_number_of_owner, store, ["x", "y"])


def test_log_mean_of_improbable_tokens():
    ours = log_mean([torch.tensor([-200.0, -1.0]), torch.tensor([-201.0, -torch.inf])])
    np.testing.assert_allclose(ours, [-200 + np.log((1 + np.exp(-1)) / 2), -1 + np.log(0.5)], rtol=1e-6)
