"""Weights of entries in every search path, against brute force: w multiplies exp(-d / T), at every temperature."""

import numpy as np
import pytest
import torch
from reference import knn_distribution, knn_probability
from stores import keys_of, make_store
from torch._subclasses.fake_tensor import FakeTensorMode

from fairseq_knnlm.index import build_index, open_index
from fairseq_knnlm.index.list_files import open_lists
from fairseq_knnlm.memory import DatastoreMemory
from fairseq_knnlm.memory.engines import make_engine
from fairseq_knnlm.memory.nearest import look_up
from fairseq_knnlm.saved_runs.format import RunFacts, SaveWriter
from fairseq_knnlm.saved_runs.scores import SavedScores
from fairseq_knnlm.search import ExactSearch, ListSearch
from fairseq_knnlm.search.early import ListEstimates
from fairseq_knnlm.search.target_mass import TargetMass, TargetRuns, log_masses, runs
from fairseq_knnlm.search.target_shares import log_target_shares

CODES = {"float16": "SQfp16", "float32": "Flat", "int8": "SQ8"}
TEMPERATURE = {"l2": 7.0, "ip": 5.0}
LISTS = 16


@pytest.fixture(scope="session")
def weighted(tmp_path_factory):
    """weighted(dtype): made-up keys whose entries have weights; once for each dtype."""
    stores = {}

    def make(dtype="float16"):
        if dtype not in stores:
            stores[dtype] = make_store(tmp_path_factory.mktemp("weighted") / dtype, 1500, dtype, weighted=True)
        return stores[dtype]

    return make


def ask(store, count=40):
    """Queries near keys, and targets of which a few are no value of the datastore."""
    rng = np.random.default_rng(3)
    queries = keys_of(store)[rng.integers(0, len(store), count)] + 0.1 * rng.normal(size=(count, store.dim))
    return queries.astype(np.float32), rng.integers(0, 55, count)


def engines(store, metric, nprobe=LISTS, **options):
    """Every engine that answers for all entries: of nprobe lists, ours as written, as FAISS opens them, resident."""
    info = build_index(store, f"IVF{LISTS},{CODES[store.manifest.key_dtype]}", metric)
    lists = open_lists(store, info)
    return {
        "exact": ExactSearch(store, metric),
        "file": ListSearch(open_index(store, info), store, metric, nprobe, lists, **options),
        "resident": ListSearch(open_index(store, info), store, metric, nprobe, lists, resident=True, **options),
        "two devices": ListSearch(
            open_index(store, info), store, metric, nprobe, lists, devices=("cpu", "cpu"), **options
        ),
        "faiss": ListSearch(open_index(store, info), store, metric, nprobe),
    }


def test_weights_are_stored(weighted):
    store = weighted()
    rng = np.random.default_rng(0)
    assert store.is_weighted and store.weights.dtype == np.float32 and store.weights.std() > 1
    np.testing.assert_array_equal(store.read_weights(390, 900), store.weights[390:900])
    ids = rng.integers(-1, len(store), (3, 7))
    np.testing.assert_allclose(store.log_weights_of(ids), np.log(store.weights[np.maximum(ids, 0)]))
    assert store.manifest.entry_bytes == 64 * 2 + 2 + 4
    info = build_index(store, f"IVF{LISTS},SQfp16", "l2")
    lists = open_lists(store, info)
    np.testing.assert_array_equal(lists.weights, store.weights[lists.file.ids()])


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_every_entry(weighted, dtype, metric):
    """k = all, scoring and generation, with every engine; all lists are visited, so that brute force sees the same."""
    store, temperature = weighted(dtype), TEMPERATURE[metric]
    queries, targets = ask(store)
    arrays = (keys_of(store), store.values, len(store))
    for name, engine in engines(store, metric).items():
        memory = DatastoreMemory(store, engine, None, 0.25, temperature, metric)
        for other in (temperature, 2 * temperature, 0.7 * temperature):
            target, total = engine.target_mass(queries, targets, [temperature, 2 * temperature, 0.7 * temperature])
            number = [temperature, 2 * temperature, 0.7 * temperature].index(other)
            expected = knn_probability(queries, targets, *arrays, other, metric, store.weights)
            np.testing.assert_allclose(np.exp(target[number] - total[number]), expected, atol=2e-4, err_msg=name)
        ours = memory.vocabulary_log_probs(torch.from_numpy(queries[:3]), 50).exp().numpy()
        expected = knn_distribution(queries[:3], *arrays, temperature, metric, 50, store.weights)
        np.testing.assert_allclose(ours, expected, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize(("mask", "score"), [("index", "exact"), ("index", "index"), ("exact", "index")])
@pytest.mark.parametrize("spec", ["flat", f"IVF{LISTS},SQfp16", f"IVF{LISTS},PQ8x4"])
def test_k_neighbours(weighted, metric, mask, score, spec):
    """The nearest are chosen by distance alone; their shares have the weights. One query at a time is generation."""
    store, temperature, k = weighted(), TEMPERATURE[metric], 12
    queries, targets = ask(store)
    engine = make_engine(store, build_index(store, spec, metric), k, metric, mask, score, LISTS)
    memory = DatastoreMemory(store, engine, k, 0.25, temperature, metric)
    distances, ids = engine.search(queries, k)
    shares = np.exp((1 if metric == "ip" else -1) * distances.astype(np.float64) / temperature) * store.weights[ids]
    shares /= shares.sum(axis=1, keepdims=True)
    expected = (shares * (store.values[ids] == targets[:, None])).sum(axis=1)
    found = memory.target_log_probs(torch.from_numpy(queries), torch.from_numpy(targets)).exp()
    np.testing.assert_allclose(found, expected, atol=2e-4)
    some = memory.vocabulary_log_probs(torch.from_numpy(queries[:5]), 60).exp().numpy()
    np.testing.assert_allclose(some[np.arange(5), targets[:5]], expected[:5], atol=2e-4)
    np.testing.assert_allclose(some.sum(axis=1), 1, atol=1e-5)
    if "PQ" not in spec:
        arrays = (keys_of(store), store.values, k)
        expected = knn_probability(queries, targets, *arrays, temperature, metric, store.weights)
        np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_far_field(weighted, metric):
    """The mass of a list goes with the sum of its weights, and a token's part of it with the weights of its entries."""
    store = weighted()
    info = build_index(store, f"IVF{LISTS},SQfp16", metric)
    lists = open_lists(store, info)
    plain = open_lists(store, info)
    plain.__dict__["weights"] = None  # as if entries had none
    ours, without = ListEstimates(lists, metric), ListEstimates(plain, metric)
    members = np.split(lists.file.ids(), lists.file.starts[1:-1])
    sums = np.array([store.weights[ids].astype(np.float64).sum() for ids in members])
    queries, targets = ask(store)
    numbers = np.tile(np.arange(LISTS), (len(queries), 1))
    distances = np.random.default_rng(0).uniform(1, 5, numbers.shape).astype(np.float32)
    vectors = torch.from_numpy(queries)
    gained = ours.log_mass(vectors, numbers, distances, 3.0) - without.log_mass(vectors, numbers, distances, 3.0)
    np.testing.assert_allclose(gained, np.tile(np.log(sums / np.diff(lists.file.starts)), (len(queries), 1)), atol=1e-4)
    shares = log_target_shares(lists, ours.counts, numbers, targets).exp().numpy()
    values = store.values
    expected = [
        [store.weights[ids][values[ids] == token].sum() / total for ids, total in zip(members, sums)]
        for token in targets
    ]
    np.testing.assert_allclose(shares, expected, rtol=1e-5)
    entropies = []
    for ids, total in zip(members, sums):
        p = np.bincount(values[ids], store.weights[ids]) / total
        entropies.append(-(p[p > 0] * np.log(p[p > 0])).sum())
    np.testing.assert_allclose(ours._entropies, entropies, atol=1e-5)


def test_scoring_and_generation_with_a_far_field_agree(weighted):
    store = weighted()
    queries, _ = ask(store, 6)
    for name in ("file", "two devices"):
        engine = engines(store, "l2", nprobe=3, far=8)[name]
        memory = DatastoreMemory(store, engine, None, 0.25, 7.0, "l2")
        everything = memory.vocabulary_log_probs(torch.from_numpy(queries), 50).exp()
        np.testing.assert_allclose(everything.sum(dim=1), 1, atol=1e-4)
        for token in (1, 20):
            scored = memory.target_log_probs(torch.from_numpy(queries), torch.full((6,), token)).exp()
            np.testing.assert_allclose(everything[:, token], scored, atol=1e-4)


@pytest.mark.parametrize("k", [12, None])
def test_neighbours_for_people(weighted, k):
    """Shares include the weights, add up to p_kNN, and the weight is told."""
    store = weighted()
    queries, targets = ask(store, 5)
    for name in ("exact", "file"):
        memory = DatastoreMemory(store, engines(store, "l2")[name], k, 0.25, 7.0, "l2")
        found = look_up(memory, torch.from_numpy(queries), torch.from_numpy(targets), [7.0, 3.0], len(store))
        arrays = (keys_of(store), store.values, k or len(store))
        for number, temperature in enumerate([7.0, 3.0]):
            expected = knn_probability(queries, targets, *arrays, temperature, "l2", store.weights)
            np.testing.assert_allclose(np.exp(found.log_probs[number]), expected, atol=2e-4)
        for row, near in enumerate(found.neighbors):
            hits = sum(one.share for one in near if one.token == targets[row])
            np.testing.assert_allclose(hits, np.exp(found.log_probs[0, row]), atol=2e-4)
            assert all(one.weight == pytest.approx(store.weights[one.entry], rel=1e-5) for one in near)
            assert [one.share for one in near] == sorted((one.share for one in near), reverse=True)


@pytest.mark.parametrize("k", [30, None])
def test_a_save_knows_other_temperatures(weighted, tmp_path, k):
    store, run = weighted(), {"split": "valid"}
    queries, targets = ask(store, 50)
    memory = DatastoreMemory(store, ExactSearch(store, "l2"), k, 0.25, 7.0, "l2")
    memory.with_features = True
    facts = memory.facts
    facts.name = "knn0"
    writer = SaveWriter(tmp_path / "save", RunFacts(run, 0, 50, 50, [facts]))
    scores = list(memory.scores_in_parts(torch.from_numpy(queries), torch.from_numpy(targets), keep=True))
    for part in scores:
        writer.add_memory(0, part)
    writer.add(torch.full((50,), -2.0), torch.from_numpy(targets))
    writer.finish(1.0)
    saved = SavedScores.open([tmp_path / "save"])
    assert saved.run.memories[0].weighted == (k is not None)
    arrays = (keys_of(store), store.values)
    for temperature in (7.0, 14.0, 3.5) if k is None else (7.0, 20.0, 2.0):
        expected = knn_probability(queries, targets, *arrays, k or len(store), temperature, "l2", store.weights)
        found = saved.scores("knn0", None, 1 / temperature)
        np.testing.assert_allclose(np.exp(found.log_probs), expected, atol=1e-3)
    if k is None:
        return
    several = saved.log_probs_for_all_k("knn0", [5, 30], 1 / 7.0)
    for number, fewer in enumerate([5, 30]):
        expected = knn_probability(queries, targets, *arrays, fewer, 7.0, "l2", store.weights)
        np.testing.assert_allclose(np.exp(several[number]), expected, atol=1e-3)
        np.testing.assert_allclose(np.exp(saved.scores("knn0", fewer, 1 / 7.0).log_probs), expected, atol=1e-3)
    entropy = saved.scores("knn0", None, 1 / 7.0, with_entropy=True).entropy
    np.testing.assert_allclose(entropy, torch.cat([part.entropy for part in scores]), atol=2e-3)
    live = scores[0].features
    for name, column in saved.features("knn0", None, 1 / 7.0).items():  # what a gate is trained on is what it will see
        np.testing.assert_allclose(column, live[name], atol=2e-2, err_msg=name)


def test_weights_of_one_change_nothing(tmp_path, monkeypatch):
    """To the last digit."""
    plain = make_store(tmp_path / "plain", 900)
    monkeypatch.setattr(np, "exp", lambda numbers: np.ones_like(numbers))  # of which make_store makes weights
    ones = make_store(tmp_path / "ones", 900, weighted=True)
    monkeypatch.undo()
    assert (ones.weights == 1).all() and ones.fingerprint != plain.fingerprint
    np.testing.assert_array_equal(keys_of(ones), keys_of(plain))
    queries, targets = ask(plain)
    for (name, engine), other in zip(engines(plain, "l2", 4).items(), engines(ones, "l2", 4).values()):
        for one, two in zip(*(each.target_mass(queries, targets, [5.0, 10.0]) for each in (engine, other))):
            np.testing.assert_array_equal(one, two, err_msg=name)
        for one, two in zip(*(each.visited_masses(queries[:1], 5.0) for each in (engine, other))):
            np.testing.assert_array_equal(one, two, err_msg=name)
        probabilities = [
            DatastoreMemory(store, each, 10, 0.25, 5.0, "l2").target_log_probs(
                torch.from_numpy(queries), torch.from_numpy(targets)
            )
            for store, each in ((plain, engine), (ones, other))
        ]
        np.testing.assert_array_equal(*probabilities, err_msg=name)


def test_sums_on_any_device():
    """The sums of a run gathered entry by entry, as GPUs do it, and with fake tensors of another device."""
    rng = np.random.default_rng(0)
    near, weights = torch.randn(5, 30), torch.rand(30) + 0.5
    values, targets = np.sort(rng.integers(0, 4, 30)), rng.integers(0, 6, 5)
    found = TargetRuns(*runs(values), targets)
    shares = near.double().exp() * weights
    expected = (shares.numpy() * (values == targets[:, None])).sum(axis=1)
    gathered = found._gathered_sums(near.exp() * weights, torch.zeros(5, dtype=torch.double))
    np.testing.assert_allclose(gathered, expected, rtol=1e-5)
    mass = TargetMass(targets, [1.0])
    mass.add(torch.arange(5), near.clone(), torch.zeros(5), *runs(values), weights=weights)
    np.testing.assert_allclose(np.exp(mass.result().target[0]), expected, rtol=1e-5)
    np.testing.assert_allclose(np.exp(mass.result().total[0]), shares.sum(dim=1), rtol=1e-5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        similarities, own = torch.empty((5, 30), device="meta"), torch.empty(30, device="meta")
        masses = log_masses(similarities, torch.empty(5, device="meta"), found, [0.5, 1.0], weights=own)
        assert masses.device.type == "meta"
