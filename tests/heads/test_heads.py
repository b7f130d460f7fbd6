"""Heads against a few lines of NumPy: sums over rows, mixtures of softmaxes, clusters; and estimates from some rows."""

import numpy as np
import pytest
import torch
from reference import similarities
from stores import make_store

from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.heads.clusters import cluster_keys, count_words, drop_empty
from fairseq_knnlm.heads.head import Head
from fairseq_knnlm.heads.initial import FEW_KEYS, away_by_frequency, centre_rows
from fairseq_knnlm.heads.learning import Learning, Plan
from fairseq_knnlm.heads.objective import Objective
from fairseq_knnlm.heads.pairs import Batch, ShuffledPairs
from fairseq_knnlm.heads.rows import RowLayout, RowSpec, counts_for_total
from fairseq_knnlm.heads.trunks import make_trunk

DIM, WORDS = 16, 30


def random_head(metric="ip", counts=None, kind="embedding", seed=0, temperature=2.5) -> Head:
    torch.manual_seed(seed)
    counts = torch.ones(WORDS, dtype=torch.long) if counts is None else counts
    trunk = make_trunk(kind, DIM, components=3, depth=2, size=2.0)
    for parameter in trunk.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
        parameter.requires_grad_(False)
    return Head(torch.randn(int(counts.sum()), DIM), RowLayout(counts), metric, temperature, trunk)


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def distribution(head: Head, states: np.ndarray) -> np.ndarray:
    """P of every word by brute force in float64: (n, dim) -> (n, V)."""
    shares = softmax(similarities(states, head.rows.numpy(), head.metric) / head.temperature)
    return np.stack([np.bincount(head.words.words.numpy(), row, minlength=WORDS) for row in shares])


UNEVEN = torch.tensor([1 + number % 4 for number in range(WORDS)])


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("counts", [None, UNEVEN], ids=["1x", "uneven"])
def test_sums_over_rows(metric, counts):
    head = random_head(metric, counts)
    keys, targets = torch.randn(40, DIM), torch.arange(40) % WORDS
    expected = distribution(head, keys.numpy())
    everything = head.vocabulary_log_probs(keys).double().exp().numpy()
    np.testing.assert_allclose(everything, expected, rtol=2e-4, atol=1e-12)
    np.testing.assert_allclose(everything.sum(axis=1), 1, rtol=1e-5)
    ours = head.target_log_probs(keys, targets).double().exp().numpy()
    np.testing.assert_allclose(ours, expected[np.arange(40), targets], rtol=2e-4)


@pytest.mark.parametrize("kind", ["mos", "network"])
def test_trunks(kind):
    head = random_head(counts=UNEVEN, kind=kind)
    keys, targets = torch.randn(40, DIM), torch.arange(40) % WORDS
    if kind == "mos":
        trunk = head.trunk
        gate = softmax((keys @ trunk.gate.T).numpy())
        parts = [distribution(head, (trunk.size * torch.tanh(keys @ p.T)).numpy()) for p in trunk.projections]
        expected = np.einsum("nc,cnv->nv", gate, np.stack(parts))
    else:
        expected = distribution(head, head.trunk(keys)[0][0].numpy())
    everything = head.vocabulary_log_probs(keys).double().exp().numpy()
    np.testing.assert_allclose(everything, expected, rtol=1e-3, atol=1e-10)
    np.testing.assert_allclose(everything.sum(axis=1), 1, rtol=1e-5)
    ours = head.target_log_probs(keys, targets).double().exp().numpy()
    np.testing.assert_allclose(ours, expected[np.arange(40), targets], rtol=1e-3)


@pytest.mark.parametrize("count", [30, 600])
def test_clusters(tmp_path, count):
    store = make_store(tmp_path / "store", 3000)
    centroids, cluster = drop_empty(*cluster_keys(store, count, seed=1))
    head = Head(centroids, count_words(cluster, store.values, len(centroids), 50), "l2", 7.0)
    keys = torch.from_numpy(store.gather_keys(np.arange(0, 3000, 100)).astype(np.float32))
    shares = softmax(similarities(keys.numpy(), centroids.numpy()) / 7.0)
    table = np.zeros((len(centroids), 50))
    np.add.at(table, (cluster.numpy(), store.values), 1)
    expected = shares @ (table / table.sum(axis=1, keepdims=True))
    everything = head.vocabulary_log_probs(keys).double().exp().numpy()
    np.testing.assert_allclose(everything, expected, rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(everything.sum(axis=1), 1, rtol=1e-5)
    targets = torch.from_numpy(store.values[::100].astype(np.int64))
    ours = head.target_log_probs(keys, targets).double().exp().numpy()
    np.testing.assert_allclose(ours, expected[np.arange(30), targets], rtol=1e-3)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_of_specs():
    frequencies = np.random.default_rng(0).zipf(1.3, 2000).astype(np.float64)
    frequencies[:10] = 0
    for spec, total in (("1x", 2000), ("9x", 18_000), ("frequency:3", 6000), ("loss:2.5", 5000)):
        counts = RowSpec.parse(spec).counts(frequencies)
        assert counts.min() >= 1
        assert counts.sum() == pytest.approx(total, rel=0.02) and counts.sum() <= total
    counts = counts_for_total(frequencies, 6000)
    assert (counts[:10] == 1).all()
    order = np.argsort(frequencies)
    assert (np.diff(counts[order]) >= 0).all()  # a more frequent word never has fewer
    for wrong in ("x", "0x", "3", "frequency", "frequency:0.5", "often:3", "99x"):
        with pytest.raises(KnnlmError, match="--rows"):
            RowSpec.parse(wrong)


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_centres(tmp_path, metric):
    store = make_store(tmp_path / "store", 3000, "float32", of_centre=True)
    keys = np.concatenate(list(store.key_blocks()))
    mean = keys.mean(axis=0)
    rows = centre_rows(RowLayout(torch.ones(50, dtype=torch.long)), store, metric, 1, 2.5).numpy()
    offsets = rows - mean if metric == "l2" else rows
    factors = []
    for word in range(40):
        own = keys[store.values == word]
        expected = (own.sum(axis=0) + FEW_KEYS * mean) / (len(own) + FEW_KEYS) - mean
        factors.append(offsets[word] @ expected / (expected @ expected))
        np.testing.assert_allclose(offsets[word], factors[-1] * expected, atol=1e-4)
    np.testing.assert_allclose(factors, factors[0], rtol=1e-3)
    scores = (keys - mean) @ offsets.T * (1 if metric == "ip" else 2) / 2.5
    assert scores.std() == pytest.approx(1, rel=0.1)
    several = centre_rows(RowLayout(torch.full((50,), 2)), store, metric, 1, 2.5).numpy().reshape(50, 2, -1)[:40]
    apart = np.linalg.norm(several[:, 0] - several[:, 1], axis=1)
    between = np.linalg.norm(several[1:, 0] - several[:-1, 0], axis=1)
    assert apart.min() > 0 and apart.mean() < 0.5 * between.mean()  # two places near the word's own centre


def test_distances_know_frequencies(tmp_path):
    store = make_store(tmp_path / "store", 3000, dim=32)
    frequencies = np.arange(50) ** 2
    layout = RowLayout(torch.ones(50, dtype=torch.long))
    keys = torch.from_numpy(np.concatenate(list(store.key_blocks())).astype(np.float32))
    rows = keys.mean(dim=0) + away_by_frequency(frequencies, layout, store, 20.0)
    found = Head(rows, layout, "l2", 20.0).vocabulary_log_probs(keys).mean(dim=0).numpy()
    expected = np.log((frequencies + 1) / (frequencies + 1).sum())
    np.testing.assert_allclose(found, expected, atol=0.2)


# --- training ---------------------------------------------------------------------------------------------------------


def learning_of(store, head, negatives=0, objective=None, **plan) -> Learning:
    frequencies = np.bincount(store.values, minlength=head.vocabulary)
    pairs = ShuffledPairs(store, 256, 1)
    return Learning(head, pairs, objective or Objective(), Plan(negatives=negatives, **plan), frequencies)


def some_batch(store, count=64) -> Batch:
    entries = np.arange(count)
    keys = torch.from_numpy(store.gather_keys(entries).astype(np.float32))
    return Batch(entries, keys, torch.from_numpy(store.values[entries].astype(np.int64)))


def head_for(store, metric, counts=None, kind="embedding") -> Head:
    torch.manual_seed(0)
    counts = torch.tensor([1 + number % 3 for number in range(50)]) if counts is None else counts
    trunk = make_trunk(kind, store.dim, 2, 2, 3.0)
    return Head(0.1 * torch.randn(int(counts.sum()), store.dim), RowLayout(counts), metric, 2.0, trunk)


@pytest.mark.parametrize("kind", ["embedding", "mos", "network"])
@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_gradient_of_the_full_loss_by_differences(store, metric, kind):
    head = head_for(store, metric, kind=kind)
    head.rows = head.rows.double()
    head.trunk.double()
    learning = learning_of(store, head)
    batch = some_batch(store)
    batch.keys = batch.keys.double()

    def loss() -> float:
        return float(learning.loss_of(0, batch)[1].detach())

    weights, value, _ = learning.loss_of(0, batch)
    value.backward()
    assert value.item() == pytest.approx(-head.target_log_probs(batch.keys, batch.targets).mean().item())
    tensors = [(head.rows, weights.grad), *((p.data, p.grad) for p in head.trunk.parameters())]
    rng = np.random.default_rng(0)
    for tensor, gradient in tensors:
        for place in rng.integers(0, tensor.numel(), 4):
            flat, before = tensor.view(-1), tensor.view(-1)[place].item()
            differences = []
            for step in (1e-5, -1e-5):
                flat[place] = before + step
                differences.append(loss())
            flat[place] = before
            slope = (differences[0] - differences[1]) / 2e-5
            assert gradient.reshape(-1)[place].item() == pytest.approx(slope, rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_sampled_gradients_are_right_on_average(store, metric):
    """With few candidates each estimate is rough; the mean of many is the gradient of the full loss."""
    head = head_for(store, metric)
    batch = some_batch(store, 256)
    weights, full_loss, _ = learning_of(store, head).loss_of(0, batch)
    full_loss.backward()
    full, total, losses = weights.grad, torch.zeros_like(head.rows), []
    # Few in a batch, so that words are missing.
    learning = learning_of(store, head)
    learning.pairs.batch = 8
    sampled = Learning(head, learning.pairs, Objective(), Plan(negatives=8), learning.frequencies)
    rng = np.random.default_rng(0)
    for step in range(1500):
        some = rng.integers(0, 256, 8)
        part = Batch(batch.entries[some], batch.keys[some], batch.targets[some])
        weights, loss, rows = sampled.loss_of(step, part)
        assert rows is not None and len(rows) < len(head.rows)
        loss.backward()
        total.index_add_(0, rows, weights.grad)
        losses.append(loss.item())
    mean = total / 1500
    assert np.mean(losses) == pytest.approx(full_loss.item(), rel=0.03)
    assert torch.nn.functional.cosine_similarity(mean.flatten(), full.flatten(), dim=0) > 0.97
    assert mean.norm().item() == pytest.approx(full.norm().item(), rel=0.1)


def test_batches_do_not_depend_on_where_they_begin(store):
    pairs = ShuffledPairs(store, 100, 3)
    every = list(pairs.batches(epoch=1))
    assert len(every) == pairs.steps == 30
    seen = np.concatenate([batch.entries for batch in every])
    assert sorted(seen) == list(range(3000)) and not np.array_equal(seen[:100], np.arange(100))
    for batch, other in zip(every[17:], pairs.batches(epoch=1, first=17), strict=True):
        np.testing.assert_array_equal(batch.entries, other.entries)
        np.testing.assert_array_equal(batch.keys, other.keys)
        np.testing.assert_array_equal(batch.keys, store.gather_keys(batch.entries))
        np.testing.assert_array_equal(batch.targets, store.values[batch.entries])


def test_interpolated_loss(store):
    lm = np.random.default_rng(0).uniform(-6, -1, len(store)).astype(np.float32)
    batch = some_batch(store)
    head = head_for(store, "ip")
    learning = learning_of(store, head, objective=Objective(lm, 0.3))
    ours = learning.loss_of(0, batch)[1].item()
    p = head.target_log_probs(batch.keys, batch.targets).exp().numpy()
    assert ours == pytest.approx(-np.log(0.7 * np.exp(lm[:64]) + 0.3 * p).mean(), rel=1e-4)
