"""List-major search against FAISS and against brute force."""

import faiss
import numpy as np
import pytest
import torch
from reference import knn_distribution, knn_probability, similarities
from stores import DIM, keys_of

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.index import build_index, open_index
from fairseq_knnlm.memory import DatastoreMemory, datastore_memory
from fairseq_knnlm.search import FaissSearch, ListSearch
from fairseq_knnlm.search import inverted_lists as ivf
from fairseq_knnlm.search import top_k as nearest


@pytest.fixture
def store(lasting_store) -> Datastore:
    return lasting_store()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("k", [1, 10, 300, 5000])
@pytest.mark.parametrize("nprobe", [1, 4])
def test_cluster_search_equals_faiss(store, queries, metric, k, nprobe):
    index = open_index(store, build_index(store, "IVF16,SQfp16", metric))
    distances, ids = ListSearch(index, store, metric, nprobe).search(queries, k)
    expected, expected_ids = FaissSearch(index, nprobe).search(queries, k)
    found = expected_ids >= 0
    np.testing.assert_array_equal(ids >= 0, found)
    np.testing.assert_allclose(distances[found], expected[found], rtol=1e-4, atol=1e-3)
    assert (ids == expected_ids).mean() > 0.99  # ties


def test_neighbours_in_parts(store, monkeypatch):
    """However little memory there is for candidates, and in whatever parts they come."""
    many = np.repeat(store.gather_keys(np.arange(700)).astype(np.float32), 3, axis=0)
    index = open_index(store, build_index(store, "IVF16,SQfp16", "l2"))
    engine = ListSearch(index, store, "l2", 4)
    expected, expected_ids = FaissSearch(index, 4).search(many, 20)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for budget, parts_a_thread in ((1 << 21, 8), (1 << 30, 1)):
        monkeypatch.setattr(ivf, "SEARCH_BYTES", budget)
        monkeypatch.setattr(nearest, "PARTS_A_THREAD", parts_a_thread)
        parts = list(engine.search_in_parts(many, 20))
        assert sum(len(ids) for _, ids in parts) == len(many)
        np.testing.assert_allclose(np.concatenate([part for part, _ in parts]), expected, rtol=1e-4, atol=1e-3)
        assert (np.concatenate([ids for _, ids in parts]) == expected_ids).mean() > 0.98  # ties
        # each part's neighbours go with its own targets
        targets = store.values[np.repeat(np.arange(700), 3)].astype(np.int64)
        retriever = DatastoreMemory(store, engine, 20, 0.25, 3.0, "l2")
        monkeypatch.setattr(datastore_memory, "QUERIES_PER_PART", 100)
        log_probs = retriever.target_log_probs(torch.from_numpy(many), torch.from_numpy(targets))
        shares = np.exp(-(expected - expected.min(axis=1, keepdims=True)) / 3.0)
        of_target = (shares * (store.values[expected_ids] == targets[:, None])).sum(axis=1) / shares.sum(axis=1)
        np.testing.assert_allclose(log_probs.exp(), of_target, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("spec", ["IVF16,SQfp16", "IVF16,Flat", "IVF16,PQ8", "PCA32,IVF16,PQ8", "IVF16,PQ32x4fs"])
@pytest.mark.parametrize("key_dtype", ["float16", "float32"])
def test_mass_of_the_visited_clusters(lasting_store, spec, metric, key_dtype):
    """Against brute force over the entries of the clusters that FAISS says are nearest."""
    store = lasting_store(2000, key_dtype)
    index = open_index(store, build_index(store, spec, metric))
    rng = np.random.default_rng(2)
    queries = keys_of(store)[rng.integers(0, 2000, 30)] + 0.05 * rng.normal(size=(30, DIM)).astype(np.float32)
    targets = rng.integers(0, 50, 30)
    engine = ListSearch(index, store, metric, nprobe=3)
    (target,), (total,) = engine.target_mass(queries, targets, [2.0])
    assert np.isfinite(total).all()
    _, clusters = engine.ivf.quantizer.search(engine._transform(queries), 3)
    invlists, keys = engine.ivf.invlists, keys_of(store)
    for row in range(30):
        ids = np.concatenate(
            [faiss.rev_swig_ptr(invlists.get_ids(int(c)), invlists.list_size(int(c))).copy() for c in clusters[row]]
        )
        expected = knn_probability(
            queries[row : row + 1], targets[row : row + 1], keys[ids], store.values[ids], len(ids), 2.0, metric
        )
        np.testing.assert_allclose(np.exp(target[row] - total[row]), expected[0], rtol=1e-3, atol=1e-6)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("spec", ["IVF16,PQ32x4fs", "IVF16(IVF4,Flat),PQ32x4fs"])
def test_every_entry_of_a_fastscan_index(store, queries, spec, metric):
    """Codes of 4 bits only say which lists to visit: with all of them visited, k = all is brute force over the keys."""
    index = open_index(store, build_index(store, spec, metric))
    engine, queries = ListSearch(index, store, metric, nprobe=16), queries.astype(np.float32)
    targets, keys = np.random.default_rng(3).integers(0, 50, len(queries)), keys_of(store)
    (target, other), (total, other_total) = engine.target_mass(queries, targets, [2.0, 8.0])
    for temperature, ours in ((2.0, target - total), (8.0, other - other_total)):
        expected = knn_probability(queries, targets, keys, store.values, len(store), temperature, metric)
        np.testing.assert_allclose(np.exp(ours), expected, rtol=1e-3, atol=1e-6)
    exact = similarities(queries, keys, metric) * (1 if metric == "ip" else -1)
    for row in (0, 7):
        distances, ids = engine.visited(queries[row : row + 1])
        np.testing.assert_array_equal(np.sort(ids[0]), np.arange(len(store)))
        np.testing.assert_allclose(distances[0], exact[row, ids[0]], rtol=1e-4, atol=1e-3)
    memory = DatastoreMemory(store, engine, None, 0.25, 2.0, metric)
    everything = memory.vocabulary_log_probs(torch.from_numpy(queries[:5]), 50).exp()
    expected = knn_distribution(queries[:5], keys, store.values, len(store), 2.0, metric, 50)
    np.testing.assert_allclose(everything, expected, rtol=1e-3, atol=1e-6)
