"""Exact search against brute force."""

import numpy as np
import pytest
from stores import keys_of

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.search import ExactSearch


@pytest.fixture
def store(lasting_store) -> Datastore:
    return lasting_store()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_exact_search(store, queries, metric):
    distances, ids = ExactSearch(store, metric).search(queries, 10)
    keys = keys_of(store)
    all_distances = queries @ keys.T if metric == "ip" else ((queries[:, None] - keys[None]) ** 2).sum(axis=2)
    best = np.sort(all_distances if metric == "l2" else -all_distances, axis=1)[:, :10]
    np.testing.assert_allclose(np.sort(distances if metric == "l2" else -distances, axis=1), best, rtol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(all_distances, ids, 1), distances, rtol=1e-4, atol=1e-3)
