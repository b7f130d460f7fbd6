"""Compact keys: fewer dimensions, 8 bits, and what is lost."""

import numpy as np
import pytest
from stores import DIM, keys_of, make_store

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.datastore import writing as datastore_writing
from fairseq_knnlm.datastore.compact import compact, describe_keys
from fairseq_knnlm.datastore.key_codec import KeyForm, check_dim, learn_codec
from fairseq_knnlm.errors import KnnlmError


def states(count=2000, dim=32, seed=0) -> np.ndarray:
    """Most of the variance is in a few directions, which are not those of the axes; and the mean is not zero."""
    rng = np.random.default_rng(seed)
    rotation, _ = np.linalg.qr(rng.normal(size=(dim, dim)))
    return (5 + rng.normal(size=(count, dim)) * 4 * 0.7 ** np.arange(dim) @ rotation).astype(np.float32)


def test_a_projection_keeps_what_it_says():
    sample = states()
    codec, projection, quantizer = learn_codec(sample, KeyForm(32, 8, "float32"))
    assert quantizer is None and projection.source_dim == 32
    np.testing.assert_allclose(codec.projection @ codec.projection.T, np.eye(8), atol=1e-5)
    kept, all_of_it = codec.encode(sample).var(axis=0).sum(), sample.var(axis=0).sum()
    assert projection.variance_kept == pytest.approx(kept / all_of_it, rel=1e-3)
    assert (np.diff(codec.encode(sample).var(axis=0)) < 0).all()  # the largest variance first


def test_distances_survive_a_projection():
    """Squared distances lose what lies outside; inner products lose nearly the same for all keys of a query."""
    keys, queries = states(), states(20, seed=0) + 0.1
    codec, projection, _ = learn_codec(keys, KeyForm(32, 16, "float32"))
    small, asked = codec.encode(keys), codec.project(queries)
    exact = ((queries[:, None] - keys) ** 2).sum(axis=2)
    ours = ((asked[:, None] - small) ** 2).sum(axis=2)
    assert (ours <= exact + 1e-3).all() and projection.variance_kept > 0.99
    assert np.abs(ours - exact).max() < 0.05 * exact.max()
    lost = queries @ keys.T - asked @ small.T
    assert lost.std(axis=1).max() < 0.02 * (queries @ keys.T).std()


def test_eight_bits_round_and_clip():
    sample = states()
    sample[7, 3] = 1000.0  # an outlier must not spoil the others
    codec, _, quantizer = learn_codec(sample, KeyForm(32, 32, "int8"))
    stored = codec.encode(sample)
    assert stored.dtype == np.int8 and stored.min() == -128 and stored.max() == 127
    others = np.delete(sample, 7, axis=0)
    error = np.abs(codec.decode(codec.encode(others)) - others)
    assert (error <= codec.step / 2 + 1e-4).mean() > 0.99 and error.max() < 2
    assert 0 < quantizer.error < 1 and 0 < quantizer.clipped < 0.01
    constant = np.ones((100, 4), np.float32)
    flat, _, _ = learn_codec(constant, KeyForm(4, 4, "int8"))
    np.testing.assert_allclose(flat.decode(flat.encode(constant)), constant, atol=1e-6)


@pytest.mark.parametrize("dim", [0, -1, 65])
def test_impossible_dimensions(dim):
    with pytest.raises(KnnlmError, match=rf"--knn-key-dim {dim} is not possible .* use 1 to 64"):
        check_dim(dim, 64)


def test_no_numbers(tmp_path):
    bad = states()
    bad[5, 5] = np.nan
    with pytest.raises(KnnlmError, match="NaN or infinite keys"):
        learn_codec(bad, KeyForm(32, 8, "int8"))
    store = make_store(tmp_path / "store", 500, "int8")
    manifest = store.manifest
    manifest.complete = False
    writer = datastore_writing.DatastoreWriter(tmp_path / "other", manifest, store.own_codec)
    shard = writer.open_shard(manifest.shards[0])
    with pytest.raises(KnnlmError, match="NaN or infinite keys"):
        shard.append(np.full((1, DIM), np.inf, np.float32), np.zeros(1))


@pytest.mark.parametrize(("dim", "dtype"), [(DIM, "int8"), (16, "float16"), (16, "int8")])
def test_compact_is_what_a_dump_would_have_stored(tmp_path, store, dim, dtype):
    small = compact(store, dim, dtype, tmp_path / "small")
    assert (small.dim, small.manifest.key_dtype, small.manifest.source_dim) == (dim, dtype, DIM)
    codec, _, _ = learn_codec(keys_of(store), KeyForm(DIM, dim, dtype))
    # in blocks of another size, a matrix product rounds otherwise
    np.testing.assert_allclose(keys_of(small), codec.decode(codec.encode(keys_of(store))), rtol=2e-3, atol=0.03)
    np.testing.assert_array_equal(small.values, store.values)
    assert f"{dim} x {dtype}" in describe_keys(small)
    rows = np.array([2999, 0, 400])
    np.testing.assert_array_equal(small.gather_keys(rows), np.concatenate(list(small.key_blocks()))[rows])
    np.testing.assert_array_equal(small.read_keys(390, 410), small.gather_keys(np.arange(390, 410)))


def test_compact_resumes(tmp_path, store, monkeypatch):
    whole = compact(store, 16, "int8", tmp_path / "whole")
    commit = datastore_writing.ShardWriter.commit

    def killed(self):
        if self.shard.number == 3:
            raise KeyboardInterrupt
        commit(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(datastore_writing.ShardWriter, "commit", killed)
        compact(store, 16, "int8", tmp_path / "part")
    part = compact(store, 16, "int8", tmp_path / "part")
    assert part.fingerprint == whole.fingerprint
    names = {path.name for path in part.folder.iterdir()}
    assert names == {path.name for path in whole.folder.iterdir()}


def test_what_compact_refuses(tmp_path, store):
    for flags, message in (((65, "int8"), "--dim 65 is not possible"), ((8, "int4"), "--dtype must be one of")):
        with pytest.raises(KnnlmError, match=message):
            compact(store, *flags, tmp_path / "small")
    with pytest.raises(KnnlmError, match="another folder"):
        compact(store, 8, "int8", store.folder)
    small = compact(store, 8, "int8", tmp_path / "small")
    with pytest.raises(KnnlmError, match="compact already"):
        compact(small, 4, "int8", tmp_path / "smaller")


def test_damaged_codec(tmp_path):
    store = make_store(tmp_path / "store", 500, "int8", dim=8)
    path = store.folder / "projection.npy"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(KnnlmError, match=r"projection.npy is damaged"):
        _ = Datastore(store.folder).codec


def test_version_1_is_read(store):
    """A manifest of the release before has no fields for compact keys."""
    import json

    path = store.folder / "manifest.json"
    content = json.loads(path.read_text())
    for name in ("projection", "quantizer", "keys_in_index", "checksum"):
        content.pop(name)
    content["version"] = 1
    path.write_text(json.dumps(content))
    old = Datastore(store.folder)
    assert old.manifest.source_dim == DIM and len(keys_of(old)) == 3000
