"""The format on disk: writing in parts, resuming, refusing what is damaged."""

import json
import os

import numpy as np
import pytest

from fairseq_knnlm.datastore import Datastore, DatastoreWriter, Manifest, plan_shards, value_dtype_for
from fairseq_knnlm.errors import KnnlmError


def manifest(rows=(10, 10, 5), dim=4, key_dtype="float16", **source) -> Manifest:
    return Manifest(
        entries=sum(rows), dim=dim, key_dtype=key_dtype, value_dtype="uint16", key="output", layer=1,
        source={"dictionary_size": 100, **source}, shards=plan_shards(list(rows)),
    )  # fmt: skip


def fill(writer: DatastoreWriter, shard, keys, values) -> None:
    output = writer.open_shard(shard)
    for row in range(shard.start, shard.stop, 3):  # in small pieces
        stop = min(row + 3, shard.stop)
        output.append(keys[row:stop], values[row:stop])
    output.commit()


@pytest.fixture
def content():
    rng = np.random.default_rng(0)
    return rng.normal(size=(25, 4)).astype(np.float32), rng.integers(0, 100, 25)


@pytest.fixture
def store(tmp_path, content):
    writer = DatastoreWriter(tmp_path / "store", manifest())
    for shard in writer.missing_shards():
        fill(writer, shard, *content)
    assert writer.finish()
    return tmp_path / "store"


def test_round_trip(store, content):
    datastore = Datastore(store)
    keys = np.concatenate(list(datastore.key_blocks(rows=3)))
    np.testing.assert_array_equal(keys, content[0].astype(np.float16))
    np.testing.assert_array_equal(datastore.values, content[1])
    ids = np.array([24, 0, 10, 9, 10])
    np.testing.assert_array_equal(datastore.gather_keys(ids), keys[ids])
    np.testing.assert_array_equal(np.concatenate(list(datastore.key_blocks(4, start=12))), keys[12:])
    assert np.load(store / "keys-00000.npy").shape == (10, 4)  # an ordinary .npy file
    assert not any(damaged for _, damaged in datastore.damaged_files())


def test_shards_in_any_order_by_several_writers(tmp_path, content):
    writers = [DatastoreWriter(tmp_path / "store", manifest()) for _ in range(2)]
    first, second, third = writers[0].missing_shards()
    fill(writers[1], third, *content)
    assert not writers[1].finish()
    with pytest.raises(KnnlmError, match=r"incomplete .1 of 3 shards."):
        Datastore(tmp_path / "store")
    fill(writers[0], first, *content)
    assert [shard.number for shard in writers[1].missing_shards()] == [1]
    fill(writers[1], second, *content)
    assert writers[0].finish() and writers[1].finish()
    np.testing.assert_array_equal(Datastore(tmp_path / "store").values, content[1])


def test_two_writers_of_one_shard(tmp_path):
    writer = DatastoreWriter(tmp_path / "store", manifest())
    shard = writer.missing_shards()[0]
    output = writer.open_shard(shard)
    with pytest.raises(KnnlmError, match="another process"):
        writer.open_shard(shard)
    output.abort()


def test_half_written_shard_starts_over(tmp_path, content):
    writer = DatastoreWriter(tmp_path / "store", manifest())
    shard = writer.missing_shards()[0]
    writer.open_shard(shard).append(content[0][:3], content[1][:3])  # and then the process is gone
    import gc

    gc.collect()
    for shard in writer.missing_shards():
        fill(writer, shard, *content)
    assert writer.finish()
    np.testing.assert_array_equal(Datastore(tmp_path / "store").values, content[1])
    assert not list((tmp_path / "store").glob("*.tmp"))


@pytest.mark.parametrize(
    ("bad", "message"), [(np.nan, "NaN"), (70000.0, "--knn-key-dtype float32"), (np.inf, "--knn-key-dtype float32")]
)
def test_bad_keys(tmp_path, content, bad, message):
    writer = DatastoreWriter(tmp_path / "store", manifest())
    keys = content[0].copy()
    keys[1, 2] = bad
    output = writer.open_shard(writer.missing_shards()[0])
    with pytest.raises(KnnlmError, match=message):
        output.append(keys[:3], content[1][:3])
    assert not list((tmp_path / "store").glob("*.tmp"))


def test_another_dump_is_refused(store):
    with pytest.raises(KnnlmError, match="data_sha256 None there, abc here"):
        DatastoreWriter(store, manifest(data_sha256="abc"))


def test_foreign_folder_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(KnnlmError, match="not empty"):
        DatastoreWriter(tmp_path, manifest())


def test_missing(tmp_path):
    with pytest.raises(KnnlmError, match="--knn-dump"):
        Datastore(tmp_path / "nothing")


def test_other_version(store):
    content = json.loads((store / "manifest.json").read_text())
    content["version"] = 99
    (store / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(KnnlmError, match="format version 99"):
        Datastore(store)


def test_damaged_manifest(store):
    text = (store / "manifest.json").read_text()
    (store / "manifest.json").write_text(text[: len(text) // 2])
    with pytest.raises(KnnlmError, match="damaged"):
        Datastore(store)


def test_truncated_shard(store):
    path = store / "keys-00001.npy"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(KnnlmError, match=r"keys-00001.npy is truncated"):
        Datastore(store)


def test_missing_shard(store):
    (store / "values-00002.npy").unlink()
    with pytest.raises(KnnlmError, match=r"values-00002.npy is missing"):
        Datastore(store)


def test_wrong_shape(store):
    np.save(store / "keys-00000.npy", np.zeros((10, 3), np.float16))
    with pytest.raises(KnnlmError, match="the manifest says"):
        Datastore(store)


def test_flipped_bit_is_found(store):
    path = store / "keys-00001.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert [name for name, damaged in Datastore(store).damaged_files() if damaged] == ["keys-00001.npy"]


def test_no_space_is_foreseen(tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))
    with pytest.raises(KnnlmError, match=r"needs .* but .* has 0 B free"):
        DatastoreWriter(tmp_path / "store", manifest())
    assert not (tmp_path / "store" / "manifest.json").exists()


def test_disk_full_while_writing(tmp_path, content):
    """A write that fails leaves the finished shards whole, and the same work can go on later."""
    writer = DatastoreWriter(tmp_path / "store", manifest())
    first, second, third = writer.missing_shards()
    fill(writer, first, *content)
    output = writer.open_shard(second)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, output._keys._descriptor)
    with pytest.raises(KnnlmError, match="the disk is full"):
        output.append(content[0][10:13], content[1][10:13])
    os.close(full)
    assert not list((tmp_path / "store").glob("*.tmp"))
    assert [shard.number for shard in writer.missing_shards()] == [1, 2]
    fill(writer, second, *content)
    fill(writer, third, *content)
    assert writer.finish()


def test_value_dtype_holds_the_vocabulary():
    assert value_dtype_for(65536) == "uint16" and value_dtype_for(65537) == "int32"
