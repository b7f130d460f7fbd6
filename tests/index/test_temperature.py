"""The temperature that is measured when an index is built: at the scale of the datastore's own distances."""

import json
import math

import numpy as np
import pytest
import torch
from stores import keys_of, make_store

from fairseq_knnlm.datastore import DatastoreWriter, Manifest, plan_shards
from fairseq_knnlm.datastore.reader import Datastore
from fairseq_knnlm.index import build_index, list_indexes, temperature
from fairseq_knnlm.index.temperature import measure_temperature, nearest_similarities, temperature_of_spread


def store_of(folder, keys: np.ndarray, **source) -> Datastore:
    """A datastore of these keys."""
    manifest = Manifest(
        entries=len(keys), dim=keys.shape[1], key_dtype="float32", value_dtype="uint16", key="output", layer=0,
        source=source, shards=plan_shards([len(keys)]),
    )  # fmt: skip
    writer = DatastoreWriter(folder, manifest)
    shard = writer.open_shard(writer.missing_shards()[0])
    shard.append(keys, np.zeros(len(keys)))
    shard.commit()
    writer.finish()
    return Datastore(folder)


@pytest.mark.parametrize("effective", [2.0, 20.0, 60.0])
def test_neighbours_are_spread_as_asked(effective):
    near = -torch.rand(50, 80, dtype=torch.double, generator=torch.Generator().manual_seed(1)) * 30
    found = temperature_of_spread(near, effective)
    shares = (near / found).softmax(dim=1)
    entropy = -(shares * shares.log()).sum(dim=1).mean()
    assert math.exp(entropy) == pytest.approx(effective, rel=0.02)


def test_neighbours_that_do_not_differ():
    assert temperature_of_spread(torch.zeros(5, 20, dtype=torch.double), 5.0) is None


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_it_has_the_scale_of_the_similarities(tmp_path, metric):
    """Keys that are 10 times as long have similarities that are 100 times as large."""
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(2000, 16)).astype(np.float32)
    ones, tens = (store_of(tmp_path / str(f), f * keys, tokens_per_sample=8) for f in (1, 10))
    assert measure_temperature(tens, metric) == pytest.approx(100 * measure_temperature(ones, metric), rel=0.01)


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_nearest_similarities_are_the_largest_outside_of_the_own_sequence(tmp_path, metric, monkeypatch):
    monkeypatch.setattr(temperature, "QUERIES", 7)
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(300, 8)).astype(np.float32)
    found = nearest_similarities(store_of(tmp_path / "store", keys, tokens_per_sample=20), metric, 300, 5, seed=3)
    queries = np.sort(np.random.default_rng(3).choice(300, 7, replace=False))
    products = keys[queries] @ keys.T
    squares = ((keys[queries, None] - keys) ** 2).sum(axis=2)
    similar = products if metric == "ip" else -squares
    similar[np.abs(queries[:, None] - np.arange(300)) <= 20] = -np.inf
    np.testing.assert_allclose(found, -np.sort(-similar, axis=1)[:, :5], rtol=1e-3, atol=1e-4)


def test_a_part_of_the_keys_tells_the_same(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    whole = store_of(tmp_path / "store", rng.normal(size=(65_536, 8)).astype(np.float32), tokens_per_sample=8)
    expected = measure_temperature(whole, "l2")
    monkeypatch.setattr(temperature, "SAMPLE_ROWS", 4096)  # with 64 of the 1,024 nearest
    assert measure_temperature(whole, "l2", thorough=False) == pytest.approx(expected, rel=0.15)


def test_too_few_or_equal_entries(tmp_path):
    assert measure_temperature(make_store(tmp_path / "few", 5), "l2") is None
    same = store_of(tmp_path / "same", np.ones((3000, 8), np.float32))
    assert measure_temperature(same, "l2") is None


def test_a_build_keeps_it_and_old_records_open(store):
    for spec in ("flat", "IVF16,SQfp16"):
        info = build_index(store, spec, "l2")
        assert info.temperature == measure_temperature(store, "l2")
    path = store.folder / "index/flat/index.json"
    record = json.loads(path.read_text())
    del record["temperature"], record["checksum"]  # as an older release wrote it
    path.write_text(json.dumps(record))
    measured = {info.name: info.temperature is not None for info in list_indexes(store)}
    assert measured == {"flat": False, "IVF16_SQfp16": True}


def test_the_whole_store_is_sampled_once(store):
    found = list(temperature._sampled_keys(store, len(store), seed=1))
    np.testing.assert_array_equal(np.concatenate([ids for ids, _ in found]), np.arange(len(store)))
    np.testing.assert_array_equal(torch.cat([keys for _, keys in found]).numpy(), keys_of(store))
