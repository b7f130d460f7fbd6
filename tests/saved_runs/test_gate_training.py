"""Training a gate: gradients, what it begins as, and that it is no worse than constant weights."""

import numpy as np
import pytest
import torch
from saves import random_save

from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.mixture.gate import GateFacts, GateMemory
from fairseq_knnlm.saved_runs import gate_training
from fairseq_knnlm.saved_runs.gate_data import GateData
from fairseq_knnlm.saved_runs.gate_learning import learn_gate
from fairseq_knnlm.saved_runs.gate_training import Network, constant_gate, split_rows, train_gate
from fairseq_knnlm.saved_runs.scores import SavedScores
from fairseq_knnlm.saved_runs.weights import best_weights

COUNT = 4000


def make_data(informative: bool = True, constant: bool = False, seed: int = 0) -> GateData:
    """Two models of which a feature tells which is better, or does not."""
    rng = np.random.default_rng(seed)
    better = rng.random(COUNT) < 0.5
    log_probs = np.stack([np.where(better, -1.0, -4.0), np.where(better, -5.0, -1.5)], axis=1)
    signal = np.where(better, 1.0, -1.0) if informative else np.zeros(COUNT)
    features = np.stack([signal + 0.5 * rng.normal(size=COUNT), rng.normal(size=COUNT)], axis=1)
    if constant:
        features[:] = 3.0
    missing = torch.zeros((COUNT, 1), dtype=torch.bool)
    return GateData(torch.from_numpy(log_probs), torch.from_numpy(features), missing, ["knn0.nearest", "lm.entropy"])


def facts_of(data: GateData) -> GateFacts:
    weights = best_weights(data.log_probs.T.numpy())
    return GateFacts({}, [GateMemory("knn0", {}, None, 1.0, float(weights[1]))], [], [], [], [])


def loss_of(gate, data: GateData) -> float:
    columns = [data.names.index(name) for name in gate.facts.features]
    return float(data.loss(gate.log_weights_of(data.features[:, columns], data.missing)))


def test_constant_features_give_the_constant_weights():
    data = make_data(constant=True)
    facts = facts_of(data)
    gate = train_gate(data, facts)
    weight = facts.memories[0].weight
    expected = torch.tensor([[1 - weight, weight]]).double().expand(COUNT, -1)
    torch.testing.assert_close(gate.log_weights_of(data.features[:, :0], data.missing).exp(), expected)


def test_before_training_it_is_the_constant_weights():
    network = Network(2, np.array([0.7, 0.3]), 8, torch.Generator().manual_seed(0))
    weights = network(torch.randn(5, 2), torch.zeros((5, 1), dtype=torch.bool)).exp()
    torch.testing.assert_close(weights, torch.tensor([[0.7, 0.3]]).expand(5, -1))


def test_gradients_against_finite_differences():
    generator = torch.Generator().manual_seed(1)
    network = Network(3, np.array([0.5, 0.3, 0.2]), 4, generator).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.double)
    features = torch.randn(20, 3, generator=generator, dtype=torch.double)
    missing = torch.rand(20, 2, generator=generator) < 0.2
    log_probs = torch.randn(20, 3, generator=generator, dtype=torch.double)
    log_probs[2, 1] = -torch.inf  # a memory that does not hold the target
    data = GateData(log_probs, features, missing, ["a", "b", "c"])
    data.loss(network(features, missing)).backward()
    for parameter in network.parameters():
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for place in range(len(flat)):
            losses = []
            for step in (1e-5, -1e-5):
                flat[place] += step
                losses.append(float(data.loss(network(features, missing)).detach()))
                flat[place] -= step
            assert float(gradient[place]) == pytest.approx((losses[0] - losses[1]) / 2e-5, abs=1e-7)


def test_a_feature_that_tells_is_used():
    data, other = make_data(), make_data(seed=1)
    gate = train_gate(data, facts_of(data))
    constants = constant_gate(gate.facts)
    theirs = float(other.loss(constants.log_weights_of(other.features[:, :0], other.missing)))
    assert loss_of(gate, other) < 0.8 * theirs
    again = train_gate(data, facts_of(data))
    assert again.facts == gate.facts  # the seed decides everything


def test_never_worse_than_the_constants_on_held_out_text(monkeypatch):
    """A training that goes astray is noticed, and the constants are kept."""
    data = make_data(informative=False)
    held_out = data.rows(split_rows(COUNT)[2])
    gate = train_gate(data, facts_of(data))
    constants = constant_gate(gate.facts)
    theirs = float(held_out.loss(constants.log_weights_of(held_out.features[:, :0], held_out.missing)))
    assert loss_of(gate, held_out) <= theirs

    def astray(network, *_):
        learnt = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
        learnt["linear"][0] += 2.0
        return learnt

    monkeypatch.setattr(gate_training, "_fit", astray)
    assert train_gate(data, facts_of(data)).facts.features == []


def test_parts_are_contiguous_and_cover_everything():
    trained, stopping, held_out = split_rows(10_000)
    assert sorted(torch.cat([trained, stopping, held_out]).tolist()) == list(range(10_000))
    assert len(trained) == 8000 and len(stopping) == len(held_out) == 1000
    assert int((held_out.diff() == 1).sum()) == 1000 - 20  # 20 blocks of 50


def test_a_save_of_an_older_release(tmp_path):
    made = random_save(tmp_path / "save", count=1200)
    with pytest.raises(KnnlmError, match="nothing that a gate could look at; score again with this release"):
        learn_gate(SavedScores.open([made.folder]))


def test_too_little_text(tmp_path):
    made = random_save(tmp_path / "save")
    with pytest.raises(KnnlmError, match="a gate needs 1,000 tokens at least, not 400"):
        learn_gate(SavedScores.open([made.folder]))
