"""A datastore as a distribution over the next token."""

import faiss
import numpy as np
import pytest
import torch
from stores import DIM

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.index import build_index, open_index
from fairseq_knnlm.memory import DatastoreMemory
from fairseq_knnlm.search import ExactSearch, ListSearch


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_vocabulary_and_target_agree(dump, metric, tmp_path):
    """The full distribution sums to one, and its target column is what scoring computes; for k and for all."""
    datastore = Datastore(dump("train"))
    index = open_index(datastore, build_index(datastore, "IVF32,SQfp16", metric, f"test-{metric}"))
    queries = torch.from_numpy(datastore.gather_keys(np.arange(5, 400, 9)).astype(np.float32)) + 0.1
    targets = torch.from_numpy(datastore.values[5:400:9].astype(np.int64))
    for engine in (ExactSearch(datastore, metric), ListSearch(index, datastore, metric, 8)):
        for k in (16, None):
            retriever = DatastoreMemory(datastore, engine, k, 0.25, 5.0, metric)
            everything = retriever.vocabulary_log_probs(queries, 208)
            np.testing.assert_allclose(everything.exp().sum(dim=1), 1, atol=1e-4)
            expected = retriever.target_log_probs(queries, targets)
            ours = everything[torch.arange(len(targets)), targets]
            np.testing.assert_allclose(ours.exp(), expected.exp(), atol=1e-4)


def test_every_visited_list_is_empty(store):
    """A coarse quantizer with a centroid far from every key."""
    index = faiss.index_factory(DIM, "IVF2,SQ8")
    far = np.full((1, DIM), 100, np.float32)
    index.quantizer.add(np.concatenate([np.zeros((1, DIM), np.float32), far]))
    keys = np.concatenate(list(store.key_blocks())).astype(np.float32)
    index.train(keys)
    index.add(keys)
    engine = ListSearch(index, store, "l2", nprobe=1)
    distances, ids = engine.visited(far)
    assert distances.shape == ids.shape == (1, 0)
    retriever = DatastoreMemory(store, engine, None, 0.25, 1.0, "l2")
    assert retriever.vocabulary_log_probs(torch.from_numpy(far), 50).exp().sum() == 0
    assert retriever.target_log_probs(torch.from_numpy(far), torch.tensor([3])).item() == -np.inf
