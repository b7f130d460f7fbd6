"""A gate from a save of a real run: scoring with it gives what the save promised."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import error_of, eval_lm_here, interactive_here, knnlm, sentence_of

from fairseq_knnlm import KNNLM
from fairseq_knnlm.mixture.gate import Gate
from fairseq_knnlm.mixture.generation import KNNLanguageModel
from fairseq_knnlm.saved_runs.gate_data import load_data
from fairseq_knnlm.saved_runs.gate_learning import learn_gate
from fairseq_knnlm.saved_runs.scores import SavedScores
from fairseq_knnlm.search.early import EARLY_NAMES
from fairseq_knnlm.tasks.gating import gate_rule

KINDS = {
    "all": ["--knn-k", "all", "--knn-temperature", "5"],
    "all and cache": ["--knn-k", "all", "--knn-temperature", "5", "--knn-cache-size", "100"],
    "number": ["--knn-k", "64"],
}


@pytest.fixture(scope="module")
def store(dump):
    return ["--knn-datastore", dump("train", "--knn-index", "IVF16,SQfp16")]  # auto has no lists for so few entries


@pytest.fixture(scope="module")
def gates(store, corpus, adaptive_model, tmp_path_factory):
    """Saves of valid and test and the gate of the former, of each kind."""
    folder, made = tmp_path_factory.mktemp("gates"), {}
    for number, (kind, flags) in enumerate(KINDS.items()):
        saves = [folder / f"{split}{number}" for split in ("valid", "test")]
        for split, save in zip(("valid", "test"), saves):
            eval_lm_here(corpus, adaptive_model, "--gen-subset", split, *store, *flags, "--knn-save", save)
        valid, test = (SavedScores.open([save]) for save in saves)
        result = learn_gate(valid, test)
        result.gate.write(folder / f"{number}.gate")
        made[kind] = SimpleNamespace(
            path=folder / f"{number}.gate", saves=saves, result=result, valid=valid, test=test, flags=flags
        )
    return made


def expected_scores(made, saved) -> np.ndarray:
    """log p of each token by what the save holds."""
    gate = Gate.open(made.path)
    data = load_data(saved, made.result.settings, gate.facts.features)
    return (gate.log_weights_of(data.features, data.missing) + data.log_probs).logsumexp(dim=1).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_scoring_equals_what_the_save_promised(gates, evaluate, corpus, adaptive_model, store, kind):
    made = gates[kind]
    real = evaluate(corpus, adaptive_model, *store, *made.result.flags(made.path).split(), split="test")
    expected = expected_scores(made, made.test)
    tolerance = 2e-3 if kind == "number" else 2e-4  # printed with four digits; distances are saved in half precision
    np.testing.assert_allclose(real.scores, expected, atol=tolerance)
    report = made.result.perplexities["test, report"]
    assert 2**real.loss == pytest.approx(report["gate"], rel=1e-5 if kind != "number" else 1e-4)
    assert report["oracle"] < report["gate"] < report["lm"]


def test_the_table_and_its_json(gates, tmp_path, capsys):
    made = gates["all and cache"]
    command = ["gate", made.saves[0], "-o", tmp_path / "gate", "--report", made.saves[1]]
    assert knnlm(*command, "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["results"] == made.result.perplexities  # the seed decides everything
    assert set(content["results"]) == {"trained on", "held out", "test, report"}
    assert f"--knn-gate {tmp_path / 'gate'} --knn-cache-size" in content["flags"]
    assert knnlm(*command, "--without", "cache") == 0
    output = capsys.readouterr().out
    assert "constant" in output and "oracle" in output and "cache-size" not in output
    assert [memory.name for memory in Gate.open(tmp_path / "gate").memories] == ["knn0"]
    held_out = made.result.perplexities["held out"]
    assert held_out["gate"] <= held_out["constant"]


@pytest.mark.parametrize("kind", ["all and cache", "number"])
def test_parts_and_batches_change_nothing(gates, evaluate, corpus, adaptive_model, store, kind):
    flags = [*store, *gates[kind].result.flags(gates[kind].path).split()]
    whole = evaluate(corpus, adaptive_model, *flags, split="test").scores
    small = evaluate(corpus, adaptive_model, *flags, "--max-tokens", "64", split="test").scores
    np.testing.assert_allclose(small, whole, atol=2e-4)
    parts = [
        evaluate(corpus, adaptive_model, *flags, "--num-shards", "3", "--shard-id", part, split="test").scores
        for part in "012"
    ]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=2e-4)


def test_the_gate_does_not_see_the_target(gates, corpus, adaptive_model, store):
    """Another last token of a text changes the weights of no token."""
    lm = KNNLM.from_pretrained(
        adaptive_model.parent, adaptive_model.name, corpus, datastore=store[1], gate=gates["all"].path
    )
    first, second = lm.score("w1 w2 w3 w4"), lm.score("w1 w2 w3 w77")
    assert np.array(first.weights).shape == (5, 1)
    np.testing.assert_allclose(first.weights[:4], second.weights[:4], rtol=1e-6)
    assert first.log_probs[3] != second.log_probs[3]
    weights, p, lm_p = np.array(first.weights)[:, 0], np.exp(first.memory_log_probs[0]), np.exp(first.lm_log_probs)
    np.testing.assert_allclose(np.exp(first.log_probs), weights * p + (1 - weights) * lm_p, rtol=1e-4)
    assert (weights.std() > 0) == bool(gates["all"].result.gate.facts.features)  # else the constants were as good


@pytest.mark.parametrize("kind", ["all", "number"])
@pytest.mark.parametrize("skip", [0, 0.5])
def test_the_vocabulary_sums_to_one_and_agrees_with_scores(gates, corpus, adaptive_model, store, kind, skip):
    if skip and kind == "number":
        return
    flags = {"gate": gates[kind].path, "gate_skip": skip}
    lm = KNNLM.from_pretrained(adaptive_model.parent, adaptive_model.name, corpus, datastore=store[1], **flags)
    scores = lm.score("w1 w2 w3 w4")
    tokens = [lm.dictionary.index(token) for token in scores.tokens]
    model = KNNLanguageModel(lm.model, lm._scorer.memories, lm._scorer.gate)
    source = torch.tensor([[lm.dictionary.eos(), *tokens[:-1]]])
    with torch.no_grad():
        p = model.get_normalized_probs(model(source), log_probs=False)[0]
    torch.testing.assert_close(p.sum(dim=1), torch.ones(5), atol=1e-5, rtol=0)
    np.testing.assert_allclose(p[range(5), tokens].log().numpy(), scores.log_probs, atol=1e-4)


def test_generation(gates, corpus, adaptive_model, store):
    flags = ["--buffer-size", "8", "--max-tokens", "2000", "--max-len-b", "10", "--beam", "2"]
    flags += [*store, "--knn-gate", gates["all"].path]
    result = interactive_here(corpus, adaptive_model, ["w1 w2 w3"], *flags)
    assert "H-0" in result.stdout


def test_score_and_inspect(gates, corpus, adaptive_model, store, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3\n")
    flags = ["--path", adaptive_model, "--data", corpus, *store, "--knn-gate", gates["all"].path]
    assert knnlm("score", *flags, "--json", "--tokens", text) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    weights = [token["weights"] for token in line["token_scores"]]
    assert len(weights) == 4 and all(0 <= weight <= 1 for (weight,) in weights)
    page = tmp_path / "page.html"
    assert knnlm("inspect", *flags, "--text", "w1 w2 w3", "-o", page) == 0
    embedded = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)[1]
    tokens = json.loads(embedded)["tokens"]
    np.testing.assert_allclose([token["g"] for token in tokens], weights, atol=1e-5)
    for token, (weight,) in zip(tokens, weights):
        assert token["mix"] == pytest.approx(weight * token["knn"] + (1 - weight) * token["lm"], rel=1e-4)


# --- leaving out visits ---------------------------------------------------------------------------------------------


def test_skipping(gates, evaluate, corpus, adaptive_model, store):
    """Nothing left out is no change at all; half of the visits, some, which does not depend on the group."""
    flags = [*store, "--knn-nprobe", "4", "--knn-gate", gates["all"].path]
    none = evaluate(corpus, adaptive_model, *flags, split="test").scores
    zero = evaluate(corpus, adaptive_model, *flags, "--knn-gate-skip", "0", split="test").scores
    np.testing.assert_array_equal(none, zero)
    half = evaluate(corpus, adaptive_model, *flags, "--knn-gate-skip", "0.5", split="test")
    assert not np.allclose(half.scores, none, atol=1e-3)
    parts = [
        evaluate(
            corpus, adaptive_model, *flags, "--knn-gate-skip", "0.5", "--num-shards", "4", "--shard-id", part,
            split="test",
        ).scores
        for part in "0123"
    ]  # fmt: skip
    np.testing.assert_allclose(np.concatenate(parts), half.scores, atol=2e-4)


def test_the_share_that_is_left_out(gates):
    """On the text that it was learnt from it is the share that was asked for."""
    made = gates["all"]
    expected = made.valid.expected_shares("knn0")
    early = np.stack([made.valid.features("knn0", None, 1.0)[name].numpy() for name in EARLY_NAMES], axis=1)
    for share in (0.1, 0.5, 0.77):
        rule = gate_rule(Gate.open(made.path), "knn0", share)
        assert rule.visited(expected, early).mean() == pytest.approx(1 - share, abs=0.02)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--knn-lambda", "0.3"], "--knn-gate decides --knn-lambda; leave one of them out"),
        (["--knn-temperature", "3"], "--knn-gate decides --knn-temperature"),
        (["--knn-cache-size", "20"], "the gate is for knn0, but this run has knn0, cache"),
        (["--knn-k", "32"], "the gate was trained with --knn-k all"),
        (["--knn-metric", "ip"], "another knn0 (its metric differs)"),
        (["--knn-gate-skip", "1.5"], "from 0 to below 1"),
        (["--knn-mask", "exact", "--knn-gate-skip", "0.5"], "--knn-gate-skip goes with --knn-k all and an index"),
    ],
)
def test_flags_that_do_not_go_with_a_gate(gates, corpus, adaptive_model, store, flags, sentence):
    command = [corpus, adaptive_model, "--gen-subset", "test", *store, "--knn-gate", gates["all"].path]
    assert sentence in sentence_of(eval_lm_here, *command, *flags)


def test_other_bad_input(gates, corpus, adaptive_model, plain_model, store, dump, tmp_path, capsys):
    path, number = gates["all"].path, gates["number"]
    scoring = [corpus, adaptive_model, "--gen-subset", "test"]
    assert "there is no gate" in sentence_of(eval_lm_here, *scoring, *store, "--knn-gate", tmp_path / "none")
    assert "does nothing without" in sentence_of(eval_lm_here, *scoring, "--knn-gate", path)
    assert "without --knn-gate" in sentence_of(eval_lm_here, *scoring, *store, "--knn-gate-skip", "0.5")
    skip = ["--knn-gate", number.path, "--knn-gate-skip", "0.5"]
    assert "knows nothing of the lists of knn0" in sentence_of(eval_lm_here, *scoring, *store, *skip)
    other = ["--knn-datastore", dump("train", model=plain_model)]
    assert "another checkpoint" in sentence_of(eval_lm_here, corpus, plain_model, "--gen-subset", "test", *other,
                                               "--knn-gate", path)  # fmt: skip
    two = ["--knn-datastore", f"{store[1]},{store[1]}", "--knn-gate", path]
    assert "the gate is for knn0, but this run has knn0, knn1" in sentence_of(eval_lm_here, *scoring, *two)
    valid, test = number.saves
    assert "no test result" in error_of(capsys, "gate", test, "-o", tmp_path / "g")
    assert "tuned on" in error_of(capsys, "gate", valid, "-o", tmp_path / "g", "--report", valid)
    assert "other datastores or flags" in error_of(
        capsys, "gate", valid, "-o", tmp_path / "g", "--report", gates["all and cache"].saves[1]
    )
    assert "is a folder" in error_of(capsys, "gate", valid, "-o", tmp_path)
    eval_lm_here(corpus, adaptive_model, "--gen-subset", "valid", "--knn-save", tmp_path / "bare")
    assert "nothing to weigh" in error_of(capsys, "gate", tmp_path / "bare", "-o", tmp_path / "g")
    assert not (tmp_path / "g").exists()
