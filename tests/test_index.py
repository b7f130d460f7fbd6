"""Index specs, building, resuming, refusing; engines against brute force."""

import faiss
import numpy as np
import pytest
import torch
from reference import knn_probability

from fairseq_knnlm import clusters, retrieval
from fairseq_knnlm import index as index_module
from fairseq_knnlm.datastore import Datastore, DatastoreWriter, Manifest, plan_shards
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.index import build_index, build_index_if_missing, list_indexes, open_index, plan_index
from fairseq_knnlm.retrieval import Retriever
from fairseq_knnlm.search import ClusterSearch, ExactSearch, FaissSearch, Rescored, ivf, nearest
from fairseq_knnlm.search.mass import TargetMass
from fairseq_knnlm.verify import verify

DIM = 64


def make_store(folder, count, key_dtype="float16", seed=0, shard=400) -> Datastore:
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(40, DIM))
    keys = (centers[rng.integers(0, 40, count)] + 0.3 * rng.normal(size=(count, DIM))).astype(np.float32)
    values = rng.integers(0, 50, count)
    rows = [min(shard, count - start) for start in range(0, count, shard)]
    manifest = Manifest(
        entries=count, dim=DIM, key_dtype=key_dtype, value_dtype="uint16", key="output", layer=0,
        source={"dictionary_size": 50}, shards=plan_shards(rows),
    )  # fmt: skip
    writer = DatastoreWriter(folder, manifest)
    for part in writer.missing_shards():
        output = writer.open_shard(part)
        output.append(keys[part.start : part.stop], values[part.start : part.stop])
        output.commit()
    writer.finish()
    return Datastore(folder)


@pytest.fixture
def store(tmp_path) -> Datastore:
    return make_store(tmp_path / "store", 3000)


@pytest.fixture
def queries(store) -> np.ndarray:
    rng = np.random.default_rng(1)
    return store.gather_keys(rng.integers(0, len(store), 50)).astype(np.float32) + 0.1 * rng.normal(size=(50, DIM))


def keys_of(store: Datastore) -> np.ndarray:
    return np.concatenate(list(store.key_blocks())).astype(np.float32)


# --- specs ----------------------------------------------------------------------------------------------------------


def test_auto_depends_on_size_and_memory(monkeypatch):
    def plan(entries, dtype="float16", dim=256):
        return plan_index("auto", entries, dim, dtype, "l2").factory

    monkeypatch.setattr(index_module, "_available_memory", lambda: 20 << 30)
    assert plan(1000) is None
    assert plan(1_000_000) == "IVF2048,SQfp16"
    assert plan(10_000_000) == "IVF16384(IVF128,Flat),SQfp16"
    assert plan(10_000_000, "float32") == "IVF16384(IVF128,Flat),Flat"
    assert plan(103_000_000, dim=1024) == "IVF131072(IVF256,Flat),PQ128x4fs"
    assert plan(3_000_000_000, dim=1024) == "IVF262144(IVF512,Flat),PQ128x4fs"


def test_too_few_entries_for_the_papers_clusters():
    plan = plan_index("paper", 1000, 256, "float16", "l2")
    assert plan.factory == "IVF16,PQ64" and "too few" in plan.why


def test_paper_is_the_papers():
    plan = plan_index("paper", 103_000_000, 1024, "float16", "l2")
    assert (plan.factory, plan.train_size) == ("IVF4096,PQ64", 1_000_000)


@pytest.mark.parametrize("spec", ["bestest", "IVF16,PQ7", "IVF16,PQ64x4fsx"])
def test_unknown_spec(spec):
    with pytest.raises(KnnlmError, match=r"neither a preset .auto, paper, flat. nor a FAISS factory string"):
        plan_index(spec, 100_000, 256, "float16", "l2")


def test_too_few_entries_for_codes():
    with pytest.raises(KnnlmError, match="use --knn-index flat"):
        plan_index("IVF4,PQ8", 100, 256, "float16", "l2")


# --- building -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "paper", "auto", "flat", "IVF16,SQfp16", "PCA32,IVF16,PQ8", "HNSW16", "IVF16,PQ32x4fs",
        "IVF64(IVF8,Flat),SQfp16", "IVF64(IVF8,Flat),PQ32x4fs",
    ],
)
@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_build_open_verify(store, spec, metric):
    info = build_index(store, spec, metric)
    assert [index.name for index in list_indexes(store)] == [info.name]
    index = open_index(store, info)
    if index is not None:
        assert index.ntotal == len(store)
        expected = faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2
        assert index.metric_type == expected
    assert not [check.problem for check in verify(store) if check.problem]
    assert build_index_if_missing(store, spec, metric) == info  # not built again
    assert not list((store.folder / "index").glob("*.partial"))


def test_several_indexes_and_the_default(store):
    build_index(store, "IVF16,PQ8", "l2")
    assert build_index_if_missing(store, None, "l2").name == "IVF16_PQ8"  # the only one
    build_index(store, "IVF16,Flat", "l2", name="mine")
    assert build_index_if_missing(store, "mine", "l2").factory == "IVF16,Flat"
    assert build_index_if_missing(store, None, "l2").name == "auto"  # two to choose from: neither
    assert build_index_if_missing(store, None, "ip").name == "auto-ip"


@pytest.mark.parametrize("spec", ["IVF16,SQfp16", "IVF16(IVF2,Flat),SQfp16", "IVF16,PQ8x4fs"])
def test_interrupted_build_resumes(store, monkeypatch, caplog, spec):
    caplog.set_level("INFO")
    whole = build_index(store, spec, "l2", name="whole")
    monkeypatch.setattr(index_module, "ADD_BLOCK", 200)
    monkeypatch.setattr(index_module, "CHECKPOINT_SECONDS", -1)
    blocks = Datastore.key_blocks

    def interrupted(self, rows, start=0):
        for number, block in enumerate(blocks(self, rows, start)):
            if number == 4:
                raise KeyboardInterrupt
            yield block

    monkeypatch.setattr(Datastore, "key_blocks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_index(store, spec, "l2", name="part")
    assert [index.name for index in list_indexes(store)] == ["whole"]
    monkeypatch.setattr(Datastore, "key_blocks", blocks)
    caplog.clear()
    part = build_index(store, spec, "l2", name="part")
    assert "training" not in caplog.text and part.sha256 == whole.sha256


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_clusters_in_groups_are_those_that_faiss_finds(store, metric, monkeypatch):
    monkeypatch.setattr(clusters, "ROWS", 500)
    index = open_index(store, build_index(store, "IVF64(IVF8,Flat),SQfp16", metric))
    groups = faiss.downcast_index(index.quantizer)
    centres = torch.from_numpy(groups.quantizer.reconstruct_n(0, 8))
    centroids = torch.from_numpy(index.quantizer.reconstruct_n(0, 64))
    keys = torch.from_numpy(keys_of(store))
    grouped = clusters.GroupedCentroids(centres, centroids, metric)
    for groups.nprobe in (1, 3, 8, 20):
        expected = index.quantizer.assign(keys.numpy(), 1)[:, 0]
        assert (grouped.nearest(keys, groups.nprobe).numpy() == expected).mean() > 0.999  # ties
    empty = clusters.GroupedCentroids(torch.cat([centres, keys[:200]]), centroids, metric)  # most groups have none
    assert (empty.nearest(keys, 1) >= 0).all()
    everywhere = clusters.nearest_centroids(keys, centroids, metric)[:, 0]
    assert (grouped.nearest(keys, 8) == everywhere).float().mean() > 0.999


def test_memory_stays_bounded(store, monkeypatch):
    """Keys are read block by block, never all at once (the sample for training aside)."""
    sizes = []
    monkeypatch.setattr(index_module, "ADD_BLOCK", 200)
    blocks = Datastore.key_blocks
    monkeypatch.setattr(
        Datastore, "key_blocks", lambda self, *a, **k: (sizes.append(len(b)) or b for b in blocks(self, *a, **k))
    )
    build_index(store, "IVF16,PQ8", "l2")
    assert max(sizes) <= 200 and sum(sizes) == 2 * len(store)  # once for its cluster, once to add it


# --- refusing -------------------------------------------------------------------------------------------------------


def test_corrupt_index(store):
    info = build_index(store, "IVF16,PQ8", "l2")
    path = store.folder / "index" / info.name / "index.faiss"
    data = path.read_bytes()
    path.write_bytes(b"x" * len(data))
    with pytest.raises(KnnlmError, match=r"is damaged .*; run knnlm build"):
        open_index(store, info)
    path.write_bytes(data[:-5])
    with pytest.raises(KnnlmError, match="instead of"):
        open_index(store, info)
    path.unlink()
    with pytest.raises(KnnlmError, match="is missing"):
        open_index(store, info)
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    path.write_bytes(flipped)
    assert any("checksum" in check.problem for check in verify(store))


def test_index_of_other_keys(store, tmp_path, caplog):
    other = make_store(tmp_path / "other", 3000, seed=5)
    build_index(other, "IVF16,PQ8", "l2")
    (other.folder / "index").rename(store.folder / "index")
    assert any("other keys" in check.problem for check in verify(store))
    info = build_index_if_missing(store, "IVF16,PQ8", "l2")
    assert "rebuilding" in caplog.text and info.keys_fingerprint == store.fingerprint


def test_no_space_for_the_index(store, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))
    with pytest.raises(KnnlmError, match="the index IVF16_PQ8 needs"):
        build_index(store, "IVF16,PQ8", "l2")
    assert list_indexes(store) == []


# --- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_exact_search(store, queries, metric):
    distances, ids = ExactSearch(store, metric).search(queries, 10)
    keys = keys_of(store)
    all_distances = queries @ keys.T if metric == "ip" else ((queries[:, None] - keys[None]) ** 2).sum(axis=2)
    best = np.sort(all_distances if metric == "l2" else -all_distances, axis=1)[:, :10]
    np.testing.assert_allclose(np.sort(distances if metric == "l2" else -distances, axis=1), best, rtol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(all_distances, ids, 1), distances, rtol=1e-4, atol=1e-3)


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
    distances, ids = Rescored(engine, store.gather_keys, metric).search(queries, 20)
    np.testing.assert_array_equal(ids, engine.search(queries, 20)[1])
    keys = keys_of(store)[ids]
    exact = np.einsum("nkd,nd->nk", keys, queries) if metric == "ip" else ((keys - queries[:, None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(distances, exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("k", [1, 10, 300, 5000])
@pytest.mark.parametrize("nprobe", [1, 4])
def test_cluster_search_equals_faiss(store, queries, metric, k, nprobe):
    index = open_index(store, build_index(store, "IVF16,SQfp16", metric))
    distances, ids = ClusterSearch(index, store, metric, nprobe).search(queries, k)
    expected, expected_ids = FaissSearch(index, nprobe).search(queries, k)
    found = expected_ids >= 0
    np.testing.assert_array_equal(ids >= 0, found)
    np.testing.assert_allclose(distances[found], expected[found], rtol=1e-4, atol=1e-3)
    assert (ids == expected_ids).mean() > 0.99  # ties


def test_neighbours_in_parts(store, monkeypatch):
    """However little memory there is for candidates, and in whatever parts they come."""
    many = np.repeat(store.gather_keys(np.arange(700)).astype(np.float32), 3, axis=0)
    index = open_index(store, build_index(store, "IVF16,SQfp16", "l2"))
    engine = ClusterSearch(index, store, "l2", 4)
    expected, expected_ids = FaissSearch(index, 4).search(many, 20)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for budget, parts_a_thread in ((1 << 21, 8), (1 << 30, 1)):
        monkeypatch.setattr(ivf, "SEARCH_BYTES", budget)
        monkeypatch.setattr(nearest, "PARTS_A_THREAD", parts_a_thread)
        parts = list(engine.search_in_parts(many, 20))
        assert len(parts) > 2 and sum(len(ids) for _, ids in parts) == len(many)
        np.testing.assert_allclose(np.concatenate([part for part, _ in parts]), expected, rtol=1e-4, atol=1e-3)
        assert (np.concatenate([ids for _, ids in parts]) == expected_ids).mean() > 0.98  # ties
        # each part's neighbours go with its own targets
        targets = store.values[np.repeat(np.arange(700), 3)].astype(np.int64)
        retriever = Retriever(store, engine, 20, 0.25, 3.0, "l2")
        monkeypatch.setattr(retrieval, "ROWS_AT_ONCE", 100)
        log_probs = retriever.target_log_probs(torch.from_numpy(many), torch.from_numpy(targets))
        shares = np.exp(-(expected - expected.min(axis=1, keepdims=True)) / 3.0)
        of_target = (shares * (store.values[expected_ids] == targets[:, None])).sum(axis=1) / shares.sum(axis=1)
        np.testing.assert_allclose(log_probs.exp(), of_target, rtol=1e-3, atol=1e-3)


def test_packed_candidates_sort_by_distance():
    distances = torch.tensor([3.5, -2.0, 0.0, 1e-30, -1e30, 7.25])
    ids = torch.tensor([5, 2**32 - 1, 0, 7, 1, 3])
    packed = nearest.pack(distances, ids)
    order = packed.argsort()
    torch.testing.assert_close(distances[order], distances.sort().values, rtol=0, atol=0)
    back, back_ids = nearest.unpack(torch.cat([packed, torch.tensor([nearest.ABSENT])]))
    assert back[:-1].equal(distances) and back_ids[:-1].equal(ids)
    assert back[-1] == torch.inf and back_ids[-1] == -1


def test_wrong_thresholds_are_noticed(store, queries, monkeypatch):
    """However bad the guess, the result is right."""
    index = open_index(store, build_index(store, "IVF16,SQfp16", "l2"))
    engine = ClusterSearch(index, store, "l2", 4)
    expected, _ = engine.search(queries, 50)
    for rank in (1, 40):  # far too strict; far too generous for the capacity
        monkeypatch.setattr(nearest, "sample_rank", lambda k, rank=rank: rank)
        np.testing.assert_allclose(engine.search(queries, 50)[0], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("spec", ["IVF16,SQfp16", "IVF16,Flat", "IVF16,PQ8", "PCA32,IVF16,PQ8"])
@pytest.mark.parametrize("key_dtype", ["float16", "float32"])
def test_mass_of_the_visited_clusters(tmp_path, spec, metric, key_dtype):
    """Against brute force over the entries of the clusters that FAISS says are nearest."""
    store = make_store(tmp_path / "store", 2000, key_dtype)
    index = open_index(store, build_index(store, spec, metric))
    rng = np.random.default_rng(2)
    queries = keys_of(store)[rng.integers(0, 2000, 30)] + 0.05 * rng.normal(size=(30, DIM)).astype(np.float32)
    targets = rng.integers(0, 50, 30)
    engine = ClusterSearch(index, store, metric, nprobe=3)
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


def test_one_sharpness_is_as_good_as_several():
    """The sums of one factor do not depend on which others are asked for with it."""
    rng = np.random.default_rng(0)
    similarities = torch.from_numpy(rng.normal(size=(5, 30)).astype(np.float32))
    values, targets = np.sort(rng.integers(0, 4, 30)), rng.integers(0, 6, 5)
    for factor in (0.5, 1.0, 2.0):
        results = []
        for factors in ([factor], [0.25, 0.5, 1.0, 2.0]):
            mass = TargetMass(targets, factors)
            mass.add(torch.arange(5), similarities.clone(), torch.zeros(5), values)
            results.append([sums[factors.index(factor)] for sums in mass.result()])
        expected = np.exp(similarities.double().numpy() * factor)
        of_target = (expected * (values == targets[:, None])).sum(axis=1)
        for target, total in results:
            np.testing.assert_allclose(np.exp(total), expected.sum(axis=1), rtol=1e-5)
            np.testing.assert_allclose(np.exp(target), of_target, rtol=1e-5)
