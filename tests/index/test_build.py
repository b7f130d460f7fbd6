"""Building an index: every kind, resumed, by several at once, named, refused."""

import threading

import faiss
import pytest
from commands import error_of
from stores import DIM, make_store

from fairseq_knnlm.cli.verification import verify_folder
from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.index import build, build_index, build_index_if_missing, list_indexes, open_index, plan, plan_index
from fairseq_knnlm.index.checking import verify_index


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
    assert not [check.problem for check in verify_folder(store.folder, everything=True) if check.problem]
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
    monkeypatch.setattr(build, "ADD_BLOCK", 200)
    monkeypatch.setattr(build, "CHECKPOINT_SECONDS", -1)
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


def test_memory_stays_bounded(store, monkeypatch):
    """Keys are read block by block, never all at once (the sample for training aside)."""
    sizes = []
    monkeypatch.setattr(build, "ADD_BLOCK", 200)
    blocks = Datastore.key_blocks
    monkeypatch.setattr(
        Datastore, "key_blocks", lambda self, *a, **k: (sizes.append(len(b)) or b for b in blocks(self, *a, **k))
    )
    index = open_index(store, build_index(store, "IVF16,PQ8", "l2"))
    assert max(sizes) == 200 and index.ntotal == len(store)


def test_index_of_other_keys(store, tmp_path, caplog):
    other = make_store(tmp_path / "other", 3000, seed=5)
    build_index(other, "IVF16,PQ8", "l2")
    (other.folder / "index").rename(store.folder / "index")
    assert any("other keys" in check.problem for check in verify_folder(store.folder, everything=True))
    info = build_index_if_missing(store, "IVF16,PQ8", "l2")
    assert "rebuilding" in caplog.text and info.keys_fingerprint == store.fingerprint


def test_no_space_for_the_index(store, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))
    with pytest.raises(KnnlmError, match="building the index IVF16_PQ8 needs"):
        build_index(store, "IVF16,PQ8", "l2")
    assert list_indexes(store) == []


@pytest.mark.parametrize("name", ["..", ".", "../../store", "a/b", "x.partial", ""])
def test_a_name_leads_nowhere_else(store, capsys, name):
    before = sorted(store.folder.rglob("*"))
    error = error_of(capsys, "build", store.folder, "--index", "flat", f"--name={name}")
    assert "cannot be the name of an index" in error
    assert sorted(store.folder.rglob("*")) == before


def test_files_that_are_not_ours_stay(store):
    build_index(store, "IVF16,SQfp16", "l2", name="mine")
    notes = store.folder / "index/mine/notes.txt"
    notes.write_text("precious")
    build_index(store, "IVF16,SQfp16", "l2", name="mine", force=True)
    (kept,) = (store.folder / "index").glob("*/notes.txt")
    assert kept.read_text() == "precious"


def test_one_builds_and_the_others_wait(store, caplog):
    """Threads stand in for processes: a lock is between open files. tests/chaos does it with processes."""
    caplog.set_level("INFO")
    infos = []
    threads = [threading.Thread(target=lambda: infos.append(build_index(store, "IVF16,SQfp16", "l2"))) for _ in "123"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(infos) == 3 and infos[0] == infos[1] == infos[2]
    assert caplog.text.count("is ready") == 1 and "waiting for it to finish" in caplog.text
    assert verify_index(store, infos[0], everything=True) == ""
    assert sorted(path.name for path in (store.folder / "index").iterdir()) == ["IVF16_SQfp16"]


def test_a_finished_build_is_not_thrown_away(store, monkeypatch, caplog):
    """Killed after its last byte and before the final rename."""
    caplog.set_level("INFO")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build, "publish_folder", killed)
        build_index(store, "IVF16,SQfp16", "l2")
    caplog.clear()
    info = build_index(store, "IVF16,SQfp16", "l2")
    assert "training" not in caplog.text and verify_index(store, info, everything=True) == ""


def test_a_resumed_build_keeps_its_plan(tmp_path, monkeypatch, caplog):
    """A later release may plan in another way; what is half done is finished as it was planned."""
    caplog.set_level("INFO")
    store = make_store(tmp_path / "large", 21_000, shard=7000)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build, "find_lists", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        build_index(store, "auto", "l2")
    monkeypatch.setattr(plan, "ENTRIES_PER_LIST", 100)
    caplog.clear()
    info = build_index(store, "auto", "l2")
    assert info.factory == "IVF32,SQfp16" and "continuing" in caplog.text and "training" not in caplog.text
    assert plan_index("auto", 21_000, DIM, "float16", "l2").factory == "IVF256,SQfp16"


def test_an_index_of_ones_own_name_is_rebuilt_from_its_spec(store, tmp_path):
    other = make_store(tmp_path / "other", 3000, seed=5)
    build_index(other, "IVF16,SQfp16", "l2", name="mine")
    (other.folder / "index").rename(store.folder / "index")
    info = build_index_if_missing(store, "mine", "l2")
    assert (info.name, info.spec, info.keys_fingerprint) == ("mine", "IVF16,SQfp16", store.fingerprint)


def test_an_index_of_another_metric(store):
    build_index(store, "IVF16,SQfp16", "l2", name="mine")
    with pytest.raises(KnnlmError, match="is for the metric l2; use --knn-metric l2"):
        build_index_if_missing(store, "mine", "ip")


def test_a_lost_index_file_is_built_again(store):
    info = build_index(store, "IVF16,SQfp16", "l2")
    path = store.folder / "index/IVF16_SQfp16/index.faiss"
    path.unlink()
    with pytest.raises(KnnlmError, match="knnlm build"):
        open_index(store, info)
    assert build_index(store, "IVF16,SQfp16", "l2").sha256 == info.sha256 and path.exists()
