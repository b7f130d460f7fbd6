"""Search in lists that we wrote: every dtype, dimension, metric and size of reads, against brute force."""

import numpy as np
import pytest
import torch
from reference import knn_distribution, knn_probability, similarities
from stores import DIM, keys_of, make_store

from fairseq_knnlm.index import build_index, open_index
from fairseq_knnlm.index.list_files import open_lists
from fairseq_knnlm.memory import DatastoreMemory
from fairseq_knnlm.search import ListSearch, list_blocks, list_visitor

FORMS = [("float16", DIM), ("float32", DIM), ("int8", DIM), ("float16", 24), ("int8", 24)]
CODES = {"float16": "SQfp16", "float32": "Flat", "int8": "SQ8"}


def engine_of(store, metric="l2", nprobe=5, far=0, lists="IVF16") -> ListSearch:
    info = build_index(store, f"{lists},{CODES[store.manifest.key_dtype]}", metric)
    return ListSearch(open_index(store, info), store, metric, nprobe, open_lists(store, info), far)


def ask(store, count=60, seed=2) -> tuple[np.ndarray, np.ndarray]:
    """Queries near keys, and targets of which a few are no value of the datastore."""
    rng = np.random.default_rng(seed)
    keys = keys_of(store)
    queries = keys[rng.integers(0, len(store), count)] + 0.05 * rng.normal(size=(count, store.dim))
    return queries.astype(np.float32), rng.integers(0, 55, count)


def visited_entries(engine: ListSearch, query: np.ndarray) -> np.ndarray:
    """By FAISS's own choice of lists."""
    _, lists = engine.ivf.quantizer.search(query, engine.nprobe)
    blocks = engine.lists.stream(np.sort(lists[0]))
    return np.concatenate([block.ids.copy() for block in blocks])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize(("dtype", "dim"), FORMS)
def test_mass_is_brute_force_over_the_visited_lists(lasting_store, dtype, dim, metric):
    store = lasting_store(3000, dtype, dim)
    engine, (queries, targets) = engine_of(store, metric), ask(store)
    (target, sharper), (total, sharper_total) = engine.target_mass(queries, targets, [2.0, 1.0])
    keys = keys_of(store)
    for row in range(len(queries)):
        ids = visited_entries(engine, queries[row : row + 1])
        one = (queries[row : row + 1], targets[row : row + 1], keys[ids], store.values[ids], len(ids))
        for temperature, ours in ((2.0, target - total), (1.0, sharper - sharper_total)):
            expected = knn_probability(*one, temperature, metric)[0]
            np.testing.assert_allclose(np.exp(ours[row]), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize(("dtype", "dim"), FORMS)
def test_neighbours_and_everything_visited(lasting_store, dtype, dim, metric):
    store = lasting_store(3000, dtype, dim)
    engine, (queries, _) = engine_of(store, metric), ask(store)
    keys, sign = keys_of(store), 1 if metric == "ip" else -1
    found_distances, _ = engine.search(queries, 20)
    for row in range(0, len(queries), 7):
        ids = visited_entries(engine, queries[row : row + 1])
        exact = similarities(queries[row : row + 1], keys[ids], metric)[0]
        np.testing.assert_allclose(sign * found_distances[row], -np.sort(-exact)[:20], rtol=1e-3, atol=2e-3)
        distances, everything = engine.visited(queries[row : row + 1])
        np.testing.assert_array_equal(np.sort(everything[0]), np.sort(ids))
        again = similarities(queries[row : row + 1], keys[everything[0]], metric)[0]
        np.testing.assert_allclose(sign * distances[0], again, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("spec", ["IVF16", "IVF64(IVF8,Flat)"])
def test_the_size_of_reads_does_not_matter(lasting_store, monkeypatch, spec):
    """However little is read at once, and however few lists are asked for: the same to the last digit."""
    store = lasting_store(3000, "int8")
    engine, (queries, targets) = engine_of(store, lists=spec), ask(store)
    expected = engine.target_mass(queries, targets, [2.0])
    for chunk, gap in ((1, 0), (5000, 0), (1 << 30, 1 << 30)):
        monkeypatch.setattr(list_blocks, "CHUNK_BYTES", chunk)
        monkeypatch.setattr(list_blocks, "MOST_GAP_BYTES", gap)
        np.testing.assert_allclose(engine.target_mass(queries, targets, [2.0]), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", CODES)
def test_our_reader_and_faiss_see_the_same(lasting_store, dtype):
    """Lists as FAISS opens them are what an older release, or another program, has left."""
    store = lasting_store(3000, dtype)
    engine, (queries, targets) = engine_of(store), ask(store)
    by_faiss = ListSearch(engine._index, store, "l2", 5)
    assert isinstance(by_faiss.lists, list_blocks.FaissLists) and isinstance(engine.lists, list_blocks.FileLists)
    for ours, theirs in zip(engine.target_mass(queries, targets, [2.0]), by_faiss.target_mass(queries, targets, [2.0])):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-5)


# --- the far field --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("metric", "temperature"), [("l2", 30.0), ("ip", 20.0)])
@pytest.mark.parametrize(("dtype", "dim"), [("float16", DIM), ("int8", 24)])
def test_the_far_field_comes_closer_to_everything(tmp_path, dtype, dim, metric, temperature):
    """With a few visited lists and all others as Gaussians, sums are nearer to those over the whole datastore."""
    store = make_store(tmp_path / "store", 3000, dtype, dim=dim, of_centre=True)
    queries, _ = ask(store, 200)
    targets = np.random.default_rng(0).integers(0, 40, 200)
    (truth_target,), (truth,) = engine_of(store, metric, 32, lists="IVF32").target_mass(queries, targets, [temperature])
    errors = {}
    for far in (0, 28):
        (target,), (total,) = engine_of(store, metric, 4, far, "IVF32").target_mass(queries, targets, [temperature])
        errors[far] = np.abs(np.exp(target - total) - np.exp(truth_target - truth)).mean()
    assert errors[28] < 0.35 * errors[0]
    assert np.abs(total - truth).mean() < 0.25  # nats


def test_one_gaussian_in_closed_form():
    """The estimate is the mean of exp(-d / T) over keys drawn from the Gaussian."""
    from types import SimpleNamespace

    from fairseq_knnlm.search.early import ListEstimates
    from fairseq_knnlm.search.far_field import FarField

    rng = np.random.default_rng(0)
    dim, variance, n = 8, 0.7, 1000
    query, centroid = rng.normal(size=dim), rng.normal(size=dim)
    lists = SimpleNamespace(
        info=SimpleNamespace(dim=dim, temperature=None), file=SimpleNamespace(starts=np.array([0, n])),
        spreads=np.array([variance * dim], np.float32), means=centroid[None].astype(np.float32), weights=None,
    )  # fmt: skip
    keys = centroid + np.sqrt(variance) * rng.normal(size=(400_000, dim))
    for metric, temperature in (("l2", 3.0), ("ip", 4.0)):
        distance = query @ centroid if metric == "ip" else ((query - centroid) ** 2).sum()
        field = FarField(lists, ListEstimates(lists, metric))
        vector = torch.from_numpy(query.astype(np.float32))[None]
        found = field.log_mass(vector, np.array([[0, -1]]), np.array([[distance, 0]], np.float32), temperature)[0]
        sample = keys @ query if metric == "ip" else -((query - keys) ** 2).sum(axis=1)
        assert float(found[0]) == pytest.approx(np.log(n * np.exp(sample / temperature).mean()), abs=0.02)
        assert float(found[1]) == -np.inf


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("far", [0, 9])
def test_probabilities_of_the_vocabulary(lasting_store, metric, far):
    """Generation and scoring agree, and everything sums to 1."""
    store = lasting_store(3000, "int8")
    engine, (queries, targets) = engine_of(store, metric, 4, far), ask(store, 20)
    memory = DatastoreMemory(store, engine, None, 0.25, 3.0, metric)
    states = queries @ (store.codec.projection if store.codec.projection is not None else np.eye(store.dim))
    everything = memory.vocabulary_log_probs(torch.from_numpy(states), 55)
    np.testing.assert_allclose(everything.exp().sum(dim=1), 1, rtol=1e-5)
    targeted = memory.target_log_probs(torch.from_numpy(states), torch.from_numpy(targets))
    picked = everything.gather(1, torch.from_numpy(targets)[:, None])[:, 0]
    np.testing.assert_allclose(targeted.exp(), picked.exp(), rtol=2e-3, atol=1e-6)
    if not far:
        row = visited_entries(engine, queries[:1])
        expected = knn_distribution(queries[:1], keys_of(store)[row], store.values[row], len(row), 3.0, metric, 55)
        np.testing.assert_allclose(everything[:1].exp(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("far", [0, 6])
def test_the_number_of_queries_at_once_does_not_matter(lasting_store, far):
    store = lasting_store(3000, "float16")
    engine, (queries, targets) = engine_of(store, far=far), ask(store)
    whole = engine.target_mass(queries, targets, [2.0, 4.0])
    parts = [engine.target_mass(queries[r : r + 7], targets[r : r + 7], [2.0, 4.0]) for r in range(0, 60, 7)]
    for ours, theirs in zip(whole, zip(*parts)):
        np.testing.assert_allclose(ours, np.concatenate(theirs, axis=1), rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("temperatures", [[2.0], [2.0, 4.0]])
def test_the_number_of_pairs_in_memory_does_not_matter(lasting_store, monkeypatch, temperatures):
    """However few queries of a list are compared with it at once; k = 8 likewise, whose threshold comes first."""
    store = lasting_store(3000, "float16")
    engine, (queries, targets) = engine_of(store, far=6), ask(store)
    whole, nearest = engine.target_mass(queries, targets, temperatures), engine.search(queries, 8)
    monkeypatch.setattr(list_visitor, "MOST_PAIRS", 500)
    for ours, theirs in zip(engine.target_mass(queries, targets, temperatures), whole):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-5)
    distances, ids = engine.search(queries, 8)
    np.testing.assert_allclose(distances, nearest[0], rtol=1e-4, atol=1e-3)
    assert (ids == nearest[1]).mean() > 0.98  # ties


def test_one_temperature_gives_what_several_give(lasting_store):
    """One temperature has a shorter way to the sums, and both are exact."""
    for dtype in ("float16", "int8"):
        store = lasting_store(3000, dtype)
        for metric in ("l2", "ip"):
            engine, (queries, targets) = engine_of(store, metric=metric), ask(store)
            one, several = (engine.target_mass(queries, targets, list(ts)) for ts in ((3.0,), (3.0, 7.0)))
            for ours, theirs in zip(one, several):
                np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6, atol=1e-6)


def test_empty_lists(tmp_path):
    """As many lists as there are distinct keys and more: some are empty, and a query may visit nothing but those."""
    store = make_store(tmp_path / "store", 2600, shard=2600)
    engine, (queries, targets) = engine_of(store, nprobe=2, far=3, lists="IVF64"), ask(store, 5)
    expected = engine.target_mass(queries, targets, [1.0])
    lists, _ = engine._nearest_lists(queries)
    engine.lists.sizes[np.unique(lists[0, :2])] = 0
    found = engine.target_mass(queries, targets, [1.0])
    assert np.isfinite(expected[1]).all() and not np.isnan(found).any()
    assert engine.visited(queries[:1])[1].shape == (1, 0)
