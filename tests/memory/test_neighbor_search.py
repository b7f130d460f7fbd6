"""Neighbours of a text in a datastore of the same text: never the token itself."""

import json

import numpy as np
import pytest
import torch
from stores import make_store

from fairseq_knnlm.cli.verification import verify_folder
from fairseq_knnlm.criterions.label_sources import NeighborLabels
from fairseq_knnlm.data.neighbor_table import NeighborTable
from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.datastore.subsample import subsample
from fairseq_knnlm.heads.objective import NeighborShares
from fairseq_knnlm.index import build_index, open_index
from fairseq_knnlm.memory.neighbor_search import make_neighbors, search_outside
from fairseq_knnlm.search import ExactSearch, ListSearch


@pytest.mark.parametrize("window", [0, 3, 50])
def test_neighbours_outside_the_window(tmp_path, window):
    store = make_store(tmp_path / "store", 600)
    keys = np.concatenate(list(store.key_blocks())).astype(np.float32)
    positions = np.arange(0, 600, 7)
    distances, ids = search_outside(ExactSearch(store, "l2"), keys[positions], 4, positions, window)
    for row, position in enumerate(positions):
        allowed = np.flatnonzero(np.abs(np.arange(600) - position) > window)
        exact = ((keys[allowed] - keys[position]) ** 2).sum(axis=1)
        np.testing.assert_allclose(distances[row], np.sort(exact)[:4], rtol=1e-4, atol=1e-4)
        assert (np.abs(ids[row] - position) > window).all()


def test_queries_that_are_a_subsample_do_not_find_themselves(tmp_path):
    store = make_store(tmp_path / "store", 1000)
    store.manifest.source["data_sha256"] = "text"
    store.manifest.save(store.folder)
    store = Datastore(store.folder)
    part = subsample(store, 0.3, 1, tmp_path / "part")
    engine = ListSearch(open_index(store, build_index(store, "IVF4,SQfp16", "l2")), store, "l2", 4)
    make_neighbors(tmp_path / "table", store, part, engine, 2, {}, 0, (0, len(part.shards)))
    ids = np.concatenate([np.load(path) for path in sorted((tmp_path / "table").glob("ids-*.npy"))])
    assert not (ids == np.asarray(part.positions)[:, None]).any()


def test_a_table_keeps_the_weights_of_entries(tmp_path):
    """What is learnt from a table gets the shares that scoring has; an older table has no weights and is continued."""
    store, temperature = make_store(tmp_path / "store", 600, weighted=True), 9.0
    queries = make_store(tmp_path / "queries", 50, seed=3)
    asked = (queries, ExactSearch(store, "l2"), 4, {"metric": "l2"}, None, (0, len(queries.shards)))
    make_neighbors(tmp_path / "table", store, *asked)
    table = NeighborTable(tmp_path / "table")
    ids, distances = table.ids(0, 50), table.distances(0, 50).astype(np.float64)
    np.testing.assert_allclose(table.log_weights(0, 50), np.log(store.weights[ids]), rtol=1e-6)
    shares = np.exp(-(distances - distances.min(axis=1, keepdims=True)) / temperature) * store.weights[ids]
    shares /= shares.sum(axis=1, keepdims=True)
    _, found = NeighborShares(table, temperature).of(np.arange(50), torch.zeros(50, dtype=torch.long))
    np.testing.assert_allclose(found, shares, atol=1e-5)
    labels = NeighborLabels(str(tmp_path / "table"), temperature).rows(0, 50)
    np.testing.assert_allclose(labels.probs, shares, atol=1e-5)
    assert [check.problem for check in verify_folder(tmp_path / "table")] == [""] * 6
    plain = make_store(tmp_path / "plain", 600)
    make_neighbors(tmp_path / "old", plain, *asked[:1], ExactSearch(plain, "l2"), *asked[2:])
    facts = json.loads((tmp_path / "old" / "neighbors.json").read_text())
    for name in ("weighted", "checksum"):
        facts.pop(name)
    (tmp_path / "old" / "neighbors.json").write_text(json.dumps(facts))
    make_neighbors(tmp_path / "old", plain, *asked[:1], ExactSearch(plain, "l2"), *asked[2:])
    assert NeighborTable(tmp_path / "old").log_weights(0, 50) is None
