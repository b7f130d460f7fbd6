"""Transformer-XL and SPALM with the stock commands: training, scoring, with and without a datastore."""

import json

import numpy as np
import pytest
import torch
from commands import SPALM_SCORING, SPALM_TRAINING, eval_lm_here, fails_with, knnlm, run
from fairseq import checkpoint_utils
from reference import has_tie, knn_probability, load, mixture

from fairseq_knnlm.data.neighbor_table import NeighborTable
from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.saved_runs.format import SavePart


def test_train_and_score(evaluate, corpus, spalm, neighbors, tokens):
    flags = [*SPALM_SCORING, "--neighbors", neighbors]
    result = evaluate(corpus, spalm, *flags)
    assert len(result.scores) == tokens["valid"]
    assert result.loss < 7.0  # 208 types are 7.7 bits


@pytest.mark.parametrize("used", [1, 4])
def test_without_memory_a_segment_stands_alone(evaluate, corpus, spalm, neighbors, used):
    """The scores are those of the network on each segment, with the tokens of the table beside it."""
    overrides = {"memory_size": 0, "neighbors_used": used}
    ours = evaluate(corpus, spalm, *SPALM_SCORING, "--neighbors", neighbors, "--model-overrides", str(overrides))
    settings = {"data": str(corpus), "neighbors": str(neighbors), **overrides}
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(spalm)], settings)
    model.eval()
    table = NeighborTable(neighbors / "valid")
    text = torch.from_numpy(table.own_tokens(0, len(table)).astype(np.int64))
    sources = torch.cat([torch.tensor([task.source_dictionary.eos()]), text[:-1]])
    scores = []
    for start in range(0, len(text), 32):
        near = torch.as_tensor(table.tokens(start, min(start + 32, len(text))))[None]
        with torch.no_grad():
            output = model(sources[None, start : start + 32], neighbors=near)
            log_probs = model.get_normalized_probs(output, log_probs=True)[0]
        scores += log_probs.gather(1, text[start : start + 32, None])[:, 0].tolist()
    np.testing.assert_allclose(ours.scores, scores, atol=1e-4)


def test_a_user_sees_one_sentence(corpus, tmp_path):
    """fairseq-train as a process: the sentence, no traceback."""
    training = ["--save-dir", tmp_path, *SPALM_TRAINING, "--arch", "spalm_lm_tiny"]
    fails_with(run("fairseq-train", corpus, *training, check=False), "run knnlm neighbors, then give --neighbors")


def test_keys_are_in_corpus_order(corpus, xl, xl_store, dump, tokens, tmp_path):
    """A dump in parts is the dump in one go: each part first reads what its states depend on."""
    whole = Datastore(xl_store["train"])
    np.testing.assert_array_equal(whole.values, Datastore(dump("train")).values)  # as the Transformer's dump has them
    assert len(whole) == tokens["train"]
    for part in ("1", "0"):
        flags = [*SPALM_SCORING, "--knn-key-dtype", "float32", "--num-shards", "2", "--shard-id", part]
        eval_lm_here(corpus, xl, "--gen-subset", "train", "--knn-dump", tmp_path / "parts", *flags)
    parts = Datastore(tmp_path / "parts")
    np.testing.assert_array_equal(parts.values, whole.values)
    np.testing.assert_allclose(load(parts)[0], load(whole)[0], atol=1e-4)


@pytest.mark.parametrize("model", ["xl", "spalm"])
def test_mixture_equals_brute_force(evaluate, corpus, dump, neighbors, model, request):
    flags = [*SPALM_SCORING, *(["--neighbors", neighbors] if model == "spalm" else [])]
    model = request.getfixturevalue(model)
    train, valid = (dump(split, *flags, "--knn-key-dtype", "float32", model=model) for split in ("train", "valid"))
    lm = evaluate(corpus, model, *flags)
    knn = ["--knn-datastore", train, "--knn-index", "flat", "--knn-k", "16", "--knn-lambda", "0.3"]
    ours = evaluate(corpus, model, *flags, *knn, "--knn-temperature", "5")
    (keys, values), (queries, targets) = load(Datastore(train)), load(Datastore(valid))
    expected = mixture(lm.scores, [knn_probability(queries, targets, keys, values, 16, 5.0)], [0.3])
    clear = ~has_tie(queries, keys, 16)
    assert clear.mean() > 0.9
    np.testing.assert_allclose(ours.scores[clear], expected[clear], atol=1e-4)


def test_shards_equal_one_run(evaluate, corpus, xl, xl_store, capsys, tmp_path):
    knn = ["--knn-datastore", xl_store["train"], "--knn-k", "16", "--knn-cache-size", "50", "--knn-cache-lambda", "0.1"]
    whole = evaluate(corpus, xl, *SPALM_SCORING, *knn).scores
    flags = [*SPALM_SCORING, *knn, "--num-shards", "3"]
    parts = [
        evaluate(corpus, xl, *flags, "--shard-id", part, "--knn-save", tmp_path / part) for part in "012"
    ]
    np.testing.assert_allclose(np.concatenate([part.scores for part in parts]), whole, atol=1e-4)
    capsys.readouterr()
    assert knnlm("tune", *(tmp_path / part for part in "012"), "--json") == 0
    scored = json.loads(capsys.readouterr().out)["results"]["valid, as scored"]
    assert scored["tokens"] == len(whole) and scored["mixture"] == pytest.approx(np.exp(-whole.mean()), rel=1e-3)


def test_a_datastore_of_another_memory(evaluate, corpus, dump, xl, xl_store):
    """The memory may differ between dump and scoring, as a context window may; a window is refused."""
    flags = [*SPALM_SCORING, "--model-overrides", "{'memory_size': 64}"]
    knn = ("--knn-k", "8", "--knn-lambda", "0.3", "--knn-temperature", "1")
    ours = evaluate(corpus, xl, *flags, "--knn-datastore", xl_store["train"], *knn)
    lm = evaluate(corpus, xl, *flags).scores
    queries, targets = load(Datastore(dump("valid", *flags, "--knn-key-dtype", "float32", model=xl)))
    keys, values = load(Datastore(xl_store["train"]))
    clear = ~has_tie(queries, keys, 8)
    assert clear.mean() > 0.9
    expected = mixture(lm, [knn_probability(queries, targets, keys, values, 8)], [0.3])
    np.testing.assert_allclose(ours.scores[clear], expected[clear], atol=1e-4)
    with pytest.raises(KnnlmError, match="instead of --context-window"):
        evaluate(corpus, xl, "--task", "spalm", "--tokens-per-sample", "64", "--context-window", "32")


@pytest.mark.parametrize("model", ["xl", "spalm"])
@pytest.mark.parametrize("memory", [32, 96])
def test_lanes_equal_one_lane(evaluate, corpus, neighbors, model, memory, request, tmp_path):
    """Scores, saved runs and keys, at the memory of training and at three times as much."""
    flags = [*SPALM_SCORING, "--model-overrides", f"{{'memory_size': {memory}}}"]
    flags += ["--neighbors", neighbors] if model == "spalm" else []
    model = request.getfixturevalue(model)
    found, keys = {}, {}
    for lanes in (1, 6):
        own = [*flags, "--batch-size", lanes]
        saving = ["--knn-save", tmp_path / f"save{lanes}", "--knn-save-top", "3"]
        found[lanes] = evaluate(corpus, model, *own, *saving).scores
        dumping = ["--knn-key-dtype", "float32", "--knn-dump", tmp_path / f"{lanes}"]
        eval_lm_here(corpus, model, *own, "--gen-subset", "valid", *dumping)
        keys[lanes] = load(Datastore(tmp_path / f"{lanes}"))
    np.testing.assert_allclose(found[6], found[1], atol=2e-5)
    second = evaluate(corpus, model, *flags, "--num-shards", "2", "--shard-id", "1", "--knn-save", tmp_path / "half")
    np.testing.assert_allclose(second.scores, found[1][-len(second.scores) :], atol=2e-5)
    np.testing.assert_array_equal(keys[6][1], keys[1][1])
    np.testing.assert_allclose(keys[6][0], keys[1][0], atol=1e-4)
    saves = [SavePart.open(str(tmp_path / f"save{lanes}")) for lanes in (1, 6)]
    for name in ("tokens", "lm"):
        np.testing.assert_allclose(*(save.arrays[name] for save in saves), atol=2e-5)
