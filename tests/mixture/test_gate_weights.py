"""Weights by context: their network, what it looks at, and its file."""

import json

import numpy as np
import pytest
import torch

from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.memory import MemoryFacts
from fairseq_knnlm.memory.features import NEAREST, PROFILE, gap_features, mass_name, neighbor_features
from fairseq_knnlm.mixture.gate import Gate, GateFacts, GateMemory, check_fits, check_names
from fairseq_knnlm.mixture.interpolation import interpolate, interpolate_by_token

MEMORIES = [
    GateMemory("knn0", {"keys": "a", "metric": "l2"}, None, 0.2, 0.4),
    GateMemory("cache", {"boundary": None}, 50, 0.5, 0.1),
]
FEATURES = ["lm.entropy", "knn0.nearest", "knn0.mass x2", "cache.nearest"]
SOURCE = {"checkpoint_sha256": "c", "dictionary_sha256": "d"}


def make_gate(seed=0, units=5) -> Gate:
    rng = np.random.default_rng(seed)
    return Gate(
        GateFacts(
            SOURCE, MEMORIES, FEATURES, rng.normal(size=4).tolist(), rng.uniform(0.5, 2, 4).tolist(),
            np.log([0.5, 0.4, 0.1]).tolist(), rng.normal(size=(3, 4)).tolist(), rng.normal(size=(units, 4)).tolist(),
            rng.normal(size=units).tolist(), rng.normal(size=(3, units)).tolist(),
        )
    )  # fmt: skip


def make_features(count=30, seed=1):
    """Of the LM (n, 3), of the datastore and of the cache; token 3 has no neighbour and 5 no cache."""
    rng = torch.Generator().manual_seed(seed)
    lm = torch.randn(count, 3, generator=rng)
    knn, cache = (
        neighbor_features(torch.randn(count, 12, generator=rng) * 3, [sharpness * factor for factor in PROFILE])
        for sharpness in (0.2, 0.5)
    )
    for known, place in ((knn, 3), (cache, 5)):
        for column in known.values():
            column[place] = -torch.inf
    return lm, [knn, cache]


def test_weights_are_those_of_the_definition():
    gate, (lm, memories) = make_gate(), make_features()
    facts = gate.facts
    raw = np.stack([lm[:, 1], memories[0][NEAREST], memories[0][mass_name(0.4)], memories[1][NEAREST]], axis=1)
    x = (raw.astype(np.float64) - facts.means) / facts.scales
    x = np.clip(np.where(np.isfinite(x), x, 0), -5, 5)
    hidden = np.tanh(x @ np.array(facts.hidden).T + facts.hidden_bias)
    logits = facts.bias + x @ np.array(facts.linear).T + hidden @ np.array(facts.output).T
    logits[3, 1] = logits[5, 2] = -np.inf
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    ours = gate.log_weights(lm, memories).exp().numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-6)
    assert ours[3, 1] == 0 and ours[5, 2] == 0  # a memory that found nothing has no say


def test_weights_do_not_depend_on_the_batch():
    gate, (lm, memories) = make_gate(), make_features()
    whole = gate.log_weights(lm, memories)
    rows = slice(7, 12)
    part = gate.log_weights(lm[rows], [{name: column[rows] for name, column in known.items()} for known in memories])
    torch.testing.assert_close(part, whole[rows])


def test_probabilities_sum_to_one():
    gate, (lm, memories) = make_gate(), make_features()
    rng = torch.Generator().manual_seed(5)
    parts = [torch.randn(30, 40, generator=rng).log_softmax(dim=1) for _ in range(3)]
    parts[1][:, ::2] = -torch.inf  # tokens that the datastore does not hold
    parts[1] = parts[1].log_softmax(dim=1)
    parts[1][3] = parts[2][5] = -torch.inf  # nothing was found
    mixture = interpolate_by_token(parts[0], parts[1:], gate.log_weights(lm, memories))
    torch.testing.assert_close(mixture.exp().sum(dim=1), torch.ones(30))
    one = interpolate_by_token(parts[0][:, 7], [p[:, 7] for p in parts[1:]], gate.log_weights(lm, memories))
    torch.testing.assert_close(one, mixture[:, 7])


def test_constant_weights_are_a_special_case():
    facts = make_gate().facts
    gate = Gate(GateFacts(SOURCE, MEMORIES, [], [], [], facts.bias))
    lm, memories = make_features()
    memories[0][NEAREST][3] = memories[1][NEAREST][5] = 0.0
    log_weights = gate.log_weights(lm, memories)
    torch.testing.assert_close(log_weights.exp(), torch.tensor([[0.5, 0.4, 0.1]]).double().expand(30, -1))
    p = [torch.randn(30).sigmoid().log() for _ in range(3)]
    torch.testing.assert_close(interpolate_by_token(p[0], p[1:], log_weights), interpolate(p[0], p[1:], [0.4, 0.1]))


def test_the_profile_of_neighbours():
    rng = np.random.default_rng(0)
    near = rng.normal(size=(9, 6)).astype(np.float32)
    near[2, 3:] = -np.inf
    near[4] = -np.inf
    found = neighbor_features(torch.from_numpy(near), [0.5, 2.0])
    with np.errstate(invalid="ignore", divide="ignore"):
        for sharpness in (0.5, 2.0):
            shares = np.exp(sharpness * (near - near.max(axis=1, keepdims=True)))
            expected = np.log(np.nan_to_num(shares).sum(axis=1))
            np.testing.assert_allclose(found[mass_name(sharpness)], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[NEAREST], near.max(axis=1))
    gaps = torch.tensor([[0.0, 1.0, torch.inf]])
    assert float(gap_features(gaps, [0.0])[mass_name(0.0)]) == pytest.approx(np.log(2))  # theta 0: how many there are


# --- the file -------------------------------------------------------------------------------------------------------


def test_written_and_read(tmp_path):
    gate, (lm, memories) = make_gate(), make_features()
    gate.write(tmp_path / "gate")
    again = Gate.open(tmp_path / "gate")
    assert again.facts == gate.facts
    assert again.log_weights(lm, memories).equal(gate.log_weights(lm, memories))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bias": [0.0]}, "do not fit together"),
        ({"scales": [1.0, 1.0, 1.0, 0.0]}, "do not fit together"),
        ({"hidden": [[1.0, 2.0]]}, "do not fit together"),
        ({"memories": None}, "lists no memories"),
        ({"features": 3}, "the field features is 3"),
        ({"format": "x"}, "does not describe a gate"),
        ({"version": 9}, "version 9"),
    ],
)
def test_a_damaged_gate(tmp_path, change, sentence):
    make_gate().write(tmp_path / "gate")
    content = json.loads((tmp_path / "gate").read_text())
    (tmp_path / "gate").write_text(json.dumps({**content, **change}))
    with pytest.raises(KnnlmError, match=sentence):
        Gate.open(tmp_path / "gate")


def test_no_gate(tmp_path):
    for path, sentence in ((tmp_path, "is a folder"), (tmp_path / "none", "there is no gate")):
        with pytest.raises(KnnlmError, match=sentence):
            Gate.open(path)
    (tmp_path / "text").write_text("not JSON")
    with pytest.raises(KnnlmError, match="is damaged"):
        Gate.open(tmp_path / "text")


def test_a_gate_for_something_else():
    gate = make_gate()
    facts = [MemoryFacts(m.name, m.neighbors, 0.1, m.sharpness, dict(m.identity)) for m in MEMORIES]
    check_fits(gate, facts, SOURCE)
    for names in (["cache", "knn0"], ["knn0"], [], ["knn0", "knn1", "cache"]):
        with pytest.raises(KnnlmError, match="the gate is for knn0, cache, but this run has"):
            check_names(gate, names)
    with pytest.raises(KnnlmError, match="another checkpoint"):
        check_fits(gate, facts, {**SOURCE, "checkpoint_sha256": "x"})
    with pytest.raises(KnnlmError, match="another dictionary"):
        check_fits(gate, facts, {**SOURCE, "dictionary_sha256": "x"})
    facts[0].identity["keys"] = "b"
    with pytest.raises(KnnlmError, match="another knn0"):
        check_fits(gate, facts, SOURCE)
    facts[0].identity["keys"], facts[1].neighbors = "a", 51
    with pytest.raises(KnnlmError, match="--knn-cache-size 50"):
        check_fits(gate, facts, SOURCE)


def test_a_feature_that_is_not_there():
    lm, memories = make_features()
    del memories[0][mass_name(0.4)]
    with pytest.raises(KnnlmError, match=r"knn0\.mass x2, which this run does not know"):
        make_gate().log_weights(lm, memories)
