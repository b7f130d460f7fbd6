"""Lists written in bounded memory: sorted, the same in however many parts, and readable by any FAISS."""

import faiss
import numpy as np
import pytest
from stores import DIM, keys_of

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.index import build_index, index_file, list_writer, open_index
from fairseq_knnlm.index.checking import verify_index
from fairseq_knnlm.index.drop_keys import drop_keys
from fairseq_knnlm.index.list_files import open_lists
from fairseq_knnlm.index.training import sample_runs
from fairseq_knnlm.search import ExactSearch

SPECS = {"float16": "IVF16,SQfp16", "float32": "IVF16,Flat", "int8": "IVF16,SQ8"}


@pytest.fixture
def small_parts(monkeypatch):
    """Many buckets, and many writes to each."""
    monkeypatch.setattr(list_writer, "BUCKET_BYTES", 20_000)
    monkeypatch.setattr(list_writer, "BUFFER_BYTES", 10_000)
    monkeypatch.setattr(list_writer, "READ_ROWS", 300)
    monkeypatch.setattr(list_writer, "BUCKETS_PER_PIECE", 2)


@pytest.mark.parametrize("dtype", SPECS)
def test_any_faiss_reads_it(lasting_store, dtype, queries):
    """Without our flags and files: the same distances as brute force over the stored keys."""
    store = lasting_store(3000, dtype)
    info = build_index(store, SPECS[dtype], "l2")
    index = faiss.read_index(str(index_file(store, info.name)))
    index.nprobe = 16
    distances, ids = index.search(queries.astype(np.float32), 5)
    expected, expected_ids = ExactSearch(store, "l2").search(queries.astype(np.float32), 5)
    np.testing.assert_allclose(distances, expected, rtol=1e-3, atol=1e-3)
    assert (ids == expected_ids).mean() > 0.98  # ties
    assert verify_index(store, info, everything=True) == ""


@pytest.mark.parametrize("spec", ["IVF16,SQfp16", "IVF64(IVF8,Flat),SQfp16", "IVF16,PQ8", "IVF16,Flat"])
def test_the_number_of_parts_does_not_matter(store, spec, request):
    whole = build_index(store, spec, "l2", name="whole")
    request.getfixturevalue("small_parts")
    parts = build_index(store, spec, "l2", name="parts")
    assert parts.sha256 == whole.sha256 and parts.files == whole.files


@pytest.mark.usefixtures("small_parts")
def test_what_stands_beside_the_lists(store):
    lists = open_lists(store, build_index(store, "IVF16,SQfp16", "l2"))
    ids, starts = lists.file.ids(), lists.file.starts
    np.testing.assert_array_equal(np.sort(ids), np.arange(len(store)))
    for number in range(16):
        own = ids[starts[number] : starts[number + 1]]
        values, counts = np.unique(store.values[own], return_counts=True)
        runs = slice(*lists.run_starts[number : number + 2])
        np.testing.assert_array_equal(lists.run_values[runs], values)
        np.testing.assert_array_equal(lists.run_ends[runs], np.cumsum(counts))
        np.testing.assert_array_equal(store.values[own], np.repeat(values, counts))  # sorted by value
        keys = keys_of(store)[own]
        np.testing.assert_allclose(lists.means[number], keys.mean(axis=0), atol=1e-5)
        around = (keys - keys.mean(axis=0)) ** 2
        assert lists.spreads[number] == pytest.approx(around.sum(axis=1).mean(), rel=1e-4)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("stage", ["partition", "write"])
def test_killed_while_lists_are_written(store, monkeypatch, caplog, stage):
    caplog.set_level("INFO")
    whole = build_index(store, "IVF16,SQfp16", "l2", name="whole")
    monkeypatch.setattr(list_writer, "CHECKPOINT_ROWS", 500)
    records, read = list_writer.ListWriter._records, list_writer.ListWriter._read_bucket
    started_at, buckets_read = [], []

    def interrupted_records(self, start):
        for number, rows in enumerate(records(self, start)):
            if number == 6:
                raise KeyboardInterrupt
            yield rows

    def interrupted_read(self, bucket):
        if bucket == 5:
            raise KeyboardInterrupt
        return read(self, bucket)

    def noted_read(self, bucket):
        buckets_read.append(bucket)
        return read(self, bucket)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if stage == "partition":
            patch.setattr(list_writer.ListWriter, "_records", interrupted_records)
        else:
            patch.setattr(list_writer.ListWriter, "_read_bucket", interrupted_read)
        build_index(store, "IVF16,SQfp16", "l2", name="part")
    monkeypatch.setattr(
        list_writer.ListWriter, "_records", lambda self, start: (started_at.append(start), records(self, start))[1]
    )
    monkeypatch.setattr(list_writer.ListWriter, "_read_bucket", noted_read)
    caplog.clear()
    part = build_index(store, "IVF16,SQfp16", "l2", name="part")
    assert part.sha256 == whole.sha256 and part.files == whole.files and "training" not in caplog.text
    assert started_at[0] == (3000 if stage == "write" else 1200)  # what was partitioned is not read again
    assert buckets_read[0] == (4 if stage == "write" else 0)  # pieces of two buckets that are written are not, either
    assert not list((store.folder / "index/part").glob("p*"))


@pytest.mark.usefixtures("small_parts")
def test_what_an_interrupted_build_wrote_need_not_be_free_again(store, monkeypatch, tmp_path):
    import shutil

    read, asked = list_writer.ListWriter._read_bucket, []

    def interrupted_read(self, bucket):
        if bucket == 5:
            raise KeyboardInterrupt
        return read(self, bucket)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(list_writer.ListWriter, "_read_bucket", interrupted_read)
        build_index(store, "IVF16,SQfp16", "l2", name="tight")
    monkeypatch.setattr("fairseq_knnlm.index.build.check_disk_space", lambda _, needed, __: asked.append(needed))
    build_index(store, "IVF16,SQfp16", "l2", name="tight")
    build_index(store, "IVF16,SQfp16", "l2", name="new")
    partition = 3000 * (2 * DIM + 16)
    assert asked[0] < asked[1] - partition and shutil.disk_usage(tmp_path).free > asked[1]


@pytest.mark.usefixtures("small_parts")
def test_lists_of_other_centroids_are_not_used(store, monkeypatch):
    """If the trained index is lost, so is what was assigned and partitioned by it."""
    whole = build_index(store, "IVF16,SQfp16", "l2", name="whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(list_writer.ListWriter, "_read_bucket", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        build_index(store, "IVF16,SQfp16", "l2", name="part")
    work = store.folder / "index/part.partial"
    (work / "trained.faiss").unlink()
    lists = np.fromfile(work / "lists.int32", np.int32)
    ((lists + 1) % 16).astype(np.int32).tofile(work / "lists.int32")
    assert build_index(store, "IVF16,SQfp16", "l2", name="part").sha256 == whole.sha256


def test_no_space_for_the_partition_file(store, monkeypatch):
    import shutil

    index_alone = 3000 * (2 * DIM + 8 + 4) + 50_000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, index_alone))
    with pytest.raises(KnnlmError, match="building the index IVF16_SQfp16 needs"):
        build_index(store, "IVF16,SQfp16", "l2")


def test_damaged_files_beside_the_lists(store):
    info = build_index(store, "IVF16,SQfp16", "l2")
    for name in info.files:
        path = index_file(store, info.name).with_name(name)
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert name in verify_index(store, info, everything=False)
        path.write_bytes(data)
    assert verify_index(store, info, everything=True) == ""


@pytest.mark.parametrize("dtype", SPECS)
def test_keys_that_are_only_in_the_index(tmp_path, lasting_store, dtype):
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(lasting_store(3000, dtype).folder, folder)
    store = Datastore(folder)
    keys, stored = keys_of(store), np.concatenate(list(store.stored_blocks()))
    fingerprint, info = store.fingerprint, build_index(store, SPECS[dtype], "l2")
    dropped = drop_keys(store, info)
    assert not list(folder.glob("keys-*")) and dropped.fingerprint == fingerprint
    assert dropped.manifest.keys_in_index == info.name
    np.testing.assert_array_equal(keys_of(dropped), keys)
    rows = np.array([5, 2999, 0, 5])
    np.testing.assert_array_equal(dropped.gather_stored(rows), stored[rows])
    np.testing.assert_array_equal(np.concatenate(list(dropped.key_blocks(700, start=2500))), keys[2500:])
    assert verify_index(dropped, info, everything=True) == ""
    assert drop_keys(dropped, info).manifest.keys_in_index == info.name  # once more does nothing
    with pytest.raises(KnnlmError, match="the only copy of the keys; build another one"):
        build_index(dropped, SPECS[dtype], "l2", force=True)
    another = build_index(dropped, "IVF8,PQ8", "l2")  # from keys that are read from the lists
    assert verify_index(dropped, another, everything=True) == ""
    index_file(dropped, info.name).unlink()
    with pytest.raises(KnnlmError, match="only copy of the keys"):
        open_index(dropped, info)


def test_keys_that_must_stay(store):
    with pytest.raises(KnnlmError, match="does not hold the keys as they are stored"):
        drop_keys(store, build_index(store, "IVF16,PQ8", "l2"))
    with pytest.raises(KnnlmError, match="does not hold the keys as they are stored"):
        drop_keys(store, build_index(store, "IVF16,Flat", "l2"))  # float32 lists of float16 keys
    info = build_index(store, "IVF16,SQfp16", "l2")
    path = index_file(store, info.name)
    data = bytearray(path.read_bytes())
    data[-1000] ^= 255
    path.write_bytes(data)
    with pytest.raises(KnnlmError, match=r"is not sound .* so the keys stay"):
        drop_keys(store, info)
    assert len(list(store.folder.glob("keys-*"))) == len(store.shards)


@pytest.mark.parametrize(("entries", "count"), [(1000, 1000), (1000, 300), (10**6, 10**5), (5 * 10**6, 10**6)])
def test_sampled_entries(entries, count):
    runs = sample_runs(entries, count, seed=1)
    ids = np.concatenate([np.arange(start, stop) for start, stop in runs])
    assert len(np.unique(ids)) == len(ids) == count and ids.min() >= 0 and ids.max() < entries
    assert abs(ids.mean() / entries - 0.5) < 0.05
