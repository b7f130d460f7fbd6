"""Neighbours of a text in a datastore of the same text: never the token itself."""

import numpy as np
import pytest
from stores import make_store

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.datastore.subsample import subsample
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
