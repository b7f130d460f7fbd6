"""FAISS's own search, and its neighbours with exact distances."""

import numpy as np
import pytest
from stores import keys_of, make_store

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.index import build_index, build_index_if_missing, open_index
from fairseq_knnlm.search import ExactSearch, FaissSearch, RescoredSearch


@pytest.fixture
def store(lasting_store) -> Datastore:
    return lasting_store()


def test_more_neighbours_than_entries(tmp_path):
    small = make_store(tmp_path / "small", 100)
    build_index(small, "IVF2,Flat", "l2")
    queries = keys_of(small)[:3]
    assert ExactSearch(small, "l2").search(queries, 1000)[1].shape == (3, 100)
    index = open_index(small, build_index_if_missing(small, "IVF2,Flat", "l2"))
    ids = FaissSearch(index, 1).search(queries, 1000)[1]
    assert ids.shape == (3, 100) and (ids == -1).any()  # one cluster does not hold them all


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_rescoring_gives_exact_distances(store, queries, metric):
    index = open_index(store, build_index(store, "IVF16,PQ8", metric))
    engine = FaissSearch(index, 4)
    distances, ids = RescoredSearch(engine, store.gather_keys, metric).search(queries, 20)
    np.testing.assert_array_equal(np.sort(ids), np.sort(engine.search(queries, 20)[1]))
    assert (np.diff(distances if metric == "l2" else -distances) >= 0).all()  # best first, by these distances
    (_, ranked), = RescoredSearch(engine, store.gather_keys, metric).search_in_parts(queries, 20)
    np.testing.assert_array_equal(ranked, engine.search(queries, 20)[1])  # the first 5 are those of k = 5
    keys = keys_of(store)[ids]
    exact = np.einsum("nkd,nd->nk", keys, queries) if metric == "ip" else ((keys - queries[:, None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(distances, exact, rtol=1e-4, atol=1e-3)
