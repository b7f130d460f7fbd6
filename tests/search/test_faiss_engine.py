"""FAISS's own search, and its neighbours with exact distances."""

from types import SimpleNamespace

import faiss
import numpy as np
import pytest
import torch
from stores import keys_of, make_store

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.index import build_index, build_index_if_missing, open_index
from fairseq_knnlm.memory import devices
from fairseq_knnlm.memory.engines import make_engine
from fairseq_knnlm.search import ExactSearch, FaissSearch, RescoredSearch
from fairseq_knnlm.search.faiss_gpu import to_gpu


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


@pytest.fixture
def fake_gpu(monkeypatch):
    """What a faiss with GPUs has, as far as it can be seen without one: what was brought to which GPU, and how."""
    brought = []

    def index_cpu_to_gpu(_, number, index, options):
        if not isinstance(index, faiss.IndexIVF):
            raise RuntimeError("Error in somewhere\nThis type of index is not implemented on GPU.")
        brought.append((number, index.nprobe, options.useFloat16))
        return index

    fakes = {"StandardGpuResources": object, "GpuClonerOptions": SimpleNamespace, "index_cpu_to_gpu": index_cpu_to_gpu}
    for name, fake in fakes.items():
        monkeypatch.setattr(faiss, name, fake, raising=False)
    return brought


def test_other_indexes_go_to_the_gpu_within_its_limits(store, fake_gpu, monkeypatch, caplog):
    monkeypatch.setattr(devices, "gpu_memory", lambda _: 0)
    caplog.set_level("INFO")
    info = build_index(store, "IVF16,PQ8", "l2")
    engine = make_engine(store, info, 20, "l2", "index", "index", 5, devices=["cuda:1", "cuda:2"])
    assert isinstance(engine, FaissSearch) and fake_gpu == [(1, 5, True)]  # with the lists that it was told to visit
    assert "searched on cuda:1 alone" in caplog.text
    index, gpu = open_index(store, info), torch.device("cuda")
    assert to_gpu(index, 2049, gpu) is index and "at most 2,048 neighbours on a GPU" in caplog.text
    graph = faiss.IndexHNSWFlat(4, 4)
    assert to_gpu(graph, 5, gpu) is graph and "not implemented on GPU.), so it is searched on the CPU" in caplog.text
    assert len(fake_gpu) == 1


def test_a_faiss_without_gpus_says_so(store, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    index = open_index(store, build_index(store, "IVF16,PQ8", "l2"))
    assert to_gpu(index, 5, torch.device("cuda")) is index and "faiss-gpu has" in caplog.text
