"""The k nearest of many candidates."""

import numpy as np
import pytest
import torch

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.index import build_index, open_index
from fairseq_knnlm.search import ListSearch
from fairseq_knnlm.search import top_k as nearest


@pytest.fixture
def store(lasting_store) -> Datastore:
    return lasting_store()


def test_packed_candidates_sort_by_distance():
    distances = torch.tensor([3.5, -2.0, 0.0, 1e-30, -1e30, 7.25])
    ids = torch.tensor([5, 2**32 - 1, 0, 7, 1, 3])
    packed = nearest.pack(distances, ids)
    order = packed.argsort()
    torch.testing.assert_close(distances[order], distances.sort().values, rtol=0, atol=0)
    back, back_ids = nearest.unpack(torch.cat([packed, torch.tensor([nearest.ABSENT])]))
    assert back[:-1].equal(distances) and back_ids[:-1].equal(ids)
    assert back[-1] == torch.inf and back_ids[-1] == -1


@pytest.mark.usefixtures("threads")
def test_wrong_thresholds_are_noticed(store, queries, monkeypatch):
    """However bad the guess, the result is right."""
    index = open_index(store, build_index(store, "IVF16,SQfp16", "l2"))
    engine = ListSearch(index, store, "l2", 4)
    expected, _ = engine.search(queries, 50)
    for rank in (1, 40):  # far too strict; far too generous for the capacity
        monkeypatch.setattr(nearest, "sample_rank", lambda k, rank=rank: rank)
        np.testing.assert_allclose(engine.search(queries, 50)[0], expected, rtol=1e-4, atol=1e-3)
