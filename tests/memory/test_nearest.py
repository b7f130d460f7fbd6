"""What a person is shown of a datastore's answer agrees with what scoring used; against NumPy."""

import numpy as np
import pytest
import torch
from stores import keys_of

from fairseq_knnlm.index import build_index, open_index
from fairseq_knnlm.index.list_files import open_lists
from fairseq_knnlm.memory import DatastoreMemory
from fairseq_knnlm.memory.nearest import look_up, nearest_neighbors
from fairseq_knnlm.search import ExactSearch, ListSearch

TEMPERATURES = [2.0, 8.0, 16.0]
TEMPERATURE = 8.0


def similarity(keys: np.ndarray, queries: np.ndarray, metric: str) -> np.ndarray:
    """(n, dim), (entries, dim) -> (n, entries) double."""
    if metric == "ip":
        return queries.astype(np.float64) @ keys.T.astype(np.float64)
    return -np.square(queries[:, None].astype(np.float64) - keys[None].astype(np.float64)).sum(axis=2)


@pytest.fixture
def targets(store) -> torch.Tensor:
    return torch.from_numpy(store.values[:50].astype(np.int64))


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("k", [16, None])
def test_masses_and_shares(store, queries, targets, metric, k):
    queries = queries.astype(np.float32)
    memory = DatastoreMemory(store, ExactSearch(store, metric), k, 0.25, TEMPERATURE, metric)
    found = look_up(memory, torch.from_numpy(queries), targets, TEMPERATURES, 4)
    near = similarity(keys_of(store), queries, metric)
    order = np.argsort(-near, axis=1)[:, : k or len(store)]
    assert (found.entries == order.shape[1]).all()
    own, matches = np.take_along_axis(near, order, axis=1), store.values[order] == targets.numpy()[:, None]
    for number, temperature in enumerate(TEMPERATURES):
        masses = np.exp(own / temperature)
        np.testing.assert_allclose(found.log_masses[number], np.log(masses.sum(axis=1)), atol=1e-3)
        expected = (masses * matches).sum(axis=1) / masses.sum(axis=1)
        np.testing.assert_allclose(np.exp(found.log_probs[number]), expected, rtol=1e-3, atol=1e-7)
    shares = np.exp(own / TEMPERATURE) / np.exp(own / TEMPERATURE).sum(axis=1, keepdims=True)
    assert [neighbor.entry for neighbor in found.neighbors[7]] == order[7, :4].tolist()
    np.testing.assert_allclose([neighbor.share for neighbor in found.neighbors[7]], shares[7, :4], rtol=2e-3)
    # what scoring says at the memory's own temperature
    scored = memory.target_log_probs(torch.from_numpy(queries), targets).exp().numpy()
    np.testing.assert_allclose(np.exp(found.log_probs[1]), scored, rtol=1e-4, atol=1e-8)


def test_the_far_field_counts(store, queries, targets):
    """Shares are of all mass that scoring used, also of lists that nobody has read; so they are smaller with it."""
    queries = torch.from_numpy(queries.astype(np.float32))
    info = build_index(store, "IVF40,SQfp16", "l2", "test-far")
    shares = {}
    for far in (0, 20):
        engine = ListSearch(open_index(store, info), store, "l2", 2, open_lists(store, info), far)
        memory = DatastoreMemory(store, engine, None, 0.25, TEMPERATURE, "l2")
        found = look_up(memory, queries, targets, [TEMPERATURE], 8)
        scored = memory.target_log_probs(queries, targets).exp().numpy()
        np.testing.assert_allclose(np.exp(found.log_probs[0]), scored, rtol=1e-4, atol=1e-8)
        shares[far] = np.array([[neighbor.share for neighbor in near] for near in found.neighbors])
        _, total = engine.target_mass(memory.project(queries), targets.numpy(), [TEMPERATURE])
        distances = np.array([[neighbor.distance for neighbor in near] for near in found.neighbors])
        np.testing.assert_allclose(shares[far], np.exp(-distances / TEMPERATURE - total[0][:, None]), rtol=1e-3)
    assert (shares[20] < shares[0]).all()


def test_missing_neighbours_are_left_out(store, queries):
    """An index that finds fewer than k says so by the id -1, which is no entry."""
    engine = ExactSearch(store, "l2")

    class Half(ExactSearch):
        def search(self, queries, k):
            distances, ids = engine.search(queries, k)
            ids[:, k // 2 :] = -1
            return distances, ids

    memory = DatastoreMemory(store, Half(store, "l2"), 6, 0.25, TEMPERATURE, "l2")
    for near in nearest_neighbors(memory, torch.from_numpy(queries.astype(np.float32)), 8):
        assert len(near) == 3 and all(neighbor.entry >= 0 for neighbor in near)
        assert sum(neighbor.share for neighbor in near) == pytest.approx(1, abs=1e-4)
