"""Neighbours of a text in a datastore of the same text: never the token itself."""

import json

import numpy as np
import pytest
import torch
from stores import keys_of, make_store

from fairseq_knnlm.cli.verification import verify_folder
from fairseq_knnlm.criterions.label_sources import NeighborLabels
from fairseq_knnlm.data.neighbor_table import NeighborTable
from fairseq_knnlm.datastore import Datastore, DatastoreWriter, Manifest, plan_shards
from fairseq_knnlm.datastore.key_codec import KeyForm
from fairseq_knnlm.datastore.subsample import subsample
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.heads.objective import NeighborShares
from fairseq_knnlm.index import build_index, open_index
from fairseq_knnlm.memory.neighbor_recall import measure_recall
from fairseq_knnlm.memory.neighbor_search import make_neighbors, search_outside
from fairseq_knnlm.search import ExactSearch, ListSearch
from fairseq_knnlm.search.own_text import place_queries


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
# --- queries that are a part of the datastore's text -----------------------------------------------------------------


def store_of(folder, values, text, first=0) -> Datastore:
    """A datastore of these tokens; near positions have near keys, from ``first`` on, or random ones for None."""
    keys = np.random.default_rng(3).normal(size=(len(values), 8)).astype(np.float32)
    if first is not None:
        keys[:, 0] = 20 * np.arange(first, first + len(values))
    form = KeyForm(8, 8, "float32")
    manifest = Manifest(
        **form.facts(), entries=len(values), value_dtype="uint16", key="output", layer=0,
        source={"data_sha256": text, "tokens_per_sample": 20}, shards=plan_shards([len(values)]),
    )  # fmt: skip
    writer = DatastoreWriter(folder, manifest, None)
    output = writer.open_shard(writer.missing_shards()[0])
    output.append(keys, values)
    output.commit()
    writer.finish()
    return Datastore(folder)


TEXT = np.random.default_rng(5).zipf(1.3, 3000).clip(max=400)


@pytest.mark.parametrize("start, stop", [(0, 500), (1234, 2000), (2990, 3000)])
@pytest.mark.parametrize("thinned", ["neither", "queries", "datastore"])
def test_a_part_is_placed(tmp_path, start, stop, thinned):
    if thinned == "datastore" and stop - start < 100:
        pytest.skip("hardly any entries to recognise it by")
    store, part = store_of(tmp_path / "store", TEXT, "whole"), store_of(tmp_path / "part", TEXT[start:stop], "part")
    if thinned == "queries":
        part = subsample(part, 0.7, 1, tmp_path / "thin")
    if thinned == "datastore":
        store = subsample(store, 0.7, 1, tmp_path / "thin")
    placed = place_queries(store, part)
    own = np.arange(stop - start) if part.positions is None else part.positions
    np.testing.assert_array_equal(placed.positions, start + own)
    assert f"tokens {start:,} to {start + own[-1]:,}" in placed.sentence


def test_a_part_that_reaches_over_an_end_and_one_that_was_cut_inside_a_line(tmp_path):
    store = store_of(tmp_path / "store", TEXT[500:], "whole")
    over = store_of(tmp_path / "over", TEXT[:1500], "over")
    placed = place_queries(store, over)
    np.testing.assert_array_equal(placed.positions, np.arange(1500) - 500)
    assert "holds 1,000 of 1,500" in placed.sentence
    cut = store_of(tmp_path / "cut", np.append(TEXT[500:1100], 2), "cut")
    np.testing.assert_array_equal(place_queries(store, cut).positions, np.arange(601))


def test_what_cannot_be_placed_is_refused_and_another_text_is_not(tmp_path):
    store = store_of(tmp_path / "store", TEXT, "whole")
    pieces = store_of(tmp_path / "pieces", np.concatenate([TEXT[2000:2500], TEXT[100:600]]), "pieces")
    with pytest.raises(KnnlmError, match="not in one piece"):
        place_queries(store, pieces)
    other = np.random.default_rng(6).zipf(1.3, 3000).clip(max=400)
    assert place_queries(store, store_of(tmp_path / "other", other, "other", 9)).positions is None
    quoting = np.concatenate([other[:2000], TEXT[:400], other[2000:]])
    placed = place_queries(store, store_of(tmp_path / "quoting", quoting, "quoting"))
    assert placed.positions is None and "are taken for different texts" in placed.sentence


def test_a_table_of_a_part_leaves_out_self_and_window(tmp_path):
    store, part = store_of(tmp_path / "store", TEXT, "whole"), store_of(tmp_path / "part", TEXT[700:1000], "part", 700)
    make_neighbors(tmp_path / "table", store, part, ExactSearch(store, "l2"), 3, {}, None, (0, 1))
    ids = np.load(tmp_path / "table/ids-00000.npy")
    assert np.abs(ids - np.arange(700, 1000)[:, None]).min() == 21  # the window is a sequence of 20


def test_recall_against_brute_force(tmp_path):
    store = store_of(tmp_path / "store", TEXT[:2000], "text", first=None)
    index = open_index(store, build_index(store, "IVF16,Flat", "l2"))
    engine_of = {nprobe: ListSearch(index, store, "l2", nprobe) for nprobe in (1, 16)}
    found = measure_recall(store, store, engine_of.get, 4, "l2", 5, 300, (1, 16), seed=2)
    exact, few, all_lists = found
    assert exact.first == exact.among_k == all_lists.first == 1.0 and all_lists.among_k > 0.999
    rows = np.sort(np.random.default_rng(2).permutation(2000)[:300])
    keys = keys_of(store)
    true, near = (search_outside(e, keys[rows], 4, rows, 5)[1] for e in (ExactSearch(store, "l2"), engine_of[1]))
    assert few.among_k == pytest.approx(np.mean([len(set(a) & set(b)) / 4 for a, b in zip(true, near)]), abs=0.01)
    assert 0.3 < few.among_k < 1 and few.first == pytest.approx((true[:, 0] == near[:, 0]).mean(), abs=0.01)
    assert few.right_first == pytest.approx((store.values_of(near[:, 0]) == store.values_of(rows)).mean())
