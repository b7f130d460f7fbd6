"""Work that nodes do: the same bytes as one process, and again what is lost."""

import json
import os
import signal
from pathlib import Path

import pytest
from commands import EVAL_FLAGS, knnlm
from stores import make_store

from fairseq_knnlm.cluster.dumping_jobs import dump_folder, entries_done
from fairseq_knnlm.cluster.jobs import finished_jobs
from fairseq_knnlm.cluster.list_building import ListBuilder, counts_file, piece_file, plan_parts, rows_file
from fairseq_knnlm.cluster.nodes import living_nodes, probe
from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.index import build as building
from fairseq_knnlm.index import build_index


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "index.json"}


@pytest.mark.parametrize(("spec", "metric", "dtype"), [("IVF16,SQfp16", "l2", "float16"), ("IVF16,PQ8", "ip", "int8")])
def test_nodes_build_the_same_bytes(cluster, tmp_path, spec, metric, dtype):
    """In several parts and pieces; an interrupted build goes on with what is missing."""
    store = make_store(tmp_path / "store", 3000, dtype, weighted=dtype == "float16")
    nodes = living_nodes(cluster.ray)
    builder = ListBuilder(cluster.ray, nodes, part_bytes=20_000, bucket_bytes=4_000)

    class Stopped(Exception):
        pass

    def interrupted(*arguments):
        work = arguments[3]
        builder(*arguments)
        assert rows_file(work, 1).exists() and piece_file(work, 1).exists()
        rows_file(work, 1).unlink()
        counts_file(work, 1).unlink()
        piece_file(work, 0).unlink()
        raise Stopped

    with pytest.raises(Stopped):
        build_index(store, spec, metric, "spread", write_lists=interrupted)
    spread = build_index(store, spec, metric, "spread", write_lists=builder)
    alone = build_index(store, spec, metric, "alone")
    files, expected = (files_of(store.folder / "index" / name) for name in ("spread", "alone"))
    assert set(files) == set(expected) and all(files[name] == expected[name] for name in files)
    assert (spread.sha256, spread.head_bytes, spread.files) == (alone.sha256, alone.head_bytes, alone.files)
    assert not list((store.folder / "index").glob("*.partial"))


def test_what_only_faiss_can_fill(cluster, tmp_path):
    store = make_store(tmp_path / "store", 1000)
    with pytest.raises(KnnlmError, match=r"only FAISS itself can fill an index .*; use knnlm build"):
        build_index(store, "IVF4,PQ8x4fs", "l2", write_lists=ListBuilder(cluster.ray, living_nodes(cluster.ray)))


def test_names_of_parts_are_ours():
    for name in ("part-00001.rows", "part-00001.npy", "piece-00012.lists", "piece-00012-run_values.npy"):
        assert building.is_index_file(name)
    assert not building.is_index_file("part-1.doc") and not building.is_index_file("piece.txt")


def test_parts_are_whole_shards():
    assert plan_parts([400, 400, 400, 100], 900) == [(0, 800), (800, 1300)]
    assert plan_parts([400, 400], 10) == [(0, 400), (400, 800)] and plan_parts([5], 100) == [(0, 5)]


def test_a_lost_job_is_done_again(cluster, tmp_path):
    """Its process is killed in the middle, as when a node is lost."""

    def work(number: int, folder: str) -> int:
        mark = Path(folder) / str(number)
        if number == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    jobs = [(number, str(tmp_path)) for number in range(4)]
    found = [number for some in finished_jobs(cluster.ray, work, jobs, {"num_cpus": 1}) for number in some]
    assert sorted(found) == [0, 1, 2, 3] and (tmp_path / "1").exists()


def test_a_failed_job_is_one_sentence(cluster):
    def fail(number: int) -> int:
        from fairseq_knnlm.errors import KnnlmError

        raise KnnlmError("the disk is full; free some space")

    with pytest.raises(KnnlmError, match=r"^a job failed on a node: the disk is full; free some space$"):
        list(finished_jobs(cluster.ray, fail, [(1,)], {"num_cpus": 1}))


def test_nodes_dump_the_same_bytes(cluster, corpus, adaptive_model, dump, tmp_path):
    from fairseq_knnlm.cluster.dumping_jobs import dump as dump_with_nodes

    expected = Datastore(dump("valid"))
    folder = tmp_path / "spread"
    words = [corpus, "--path", adaptive_model, *EVAL_FLAGS, "--gen-subset", "valid", "--knn-dump", folder]
    manifest = dump_with_nodes(cluster.ray, living_nodes(cluster.ray), list(map(str, words)), parts=2)
    assert manifest.complete and entries_done(folder) == manifest.entries == len(expected)
    assert Datastore(folder).fingerprint == expected.fingerprint
    assert [shard.values_sha256 for shard in manifest.shards] == [shard.values_sha256 for shard in expected.shards]
    bad = [*words[:-1], tmp_path / "other", "--tokens-per-sample", "16"]  # less than the context
    with pytest.raises(KnnlmError, match=r"part \d of 1: --tokens-per-sample includes the context"):
        dump_with_nodes(cluster.ray, living_nodes(cluster.ray), list(map(str, bad)), parts=1)


def test_arguments_of_a_dump():
    assert dump_folder(["data", "--knn-dump", "x"]) == Path("x") == dump_folder(["--knn-dump=x"])
    with pytest.raises(KnnlmError, match="there is no --knn-dump DIR behind the --"):
        dump_folder(["data", "--knn-dump"])
    with pytest.raises(KnnlmError, match="--num-shards is what knnlm cluster dump itself sets"):
        dump_folder(["data", "--knn-dump", "x", "--num-shards", "2"])


def test_status(cluster, own_store, capsys):
    store, info = own_store
    assert knnlm("cluster", "status", store.folder, "--index", info.name, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["nodes"]
    assert len(rows) == 3 and {row["datastore"] for row in rows} == {"same"}
    nodes = living_nodes(cluster.ray)
    probe(cluster.ray, nodes)
    assert nodes[0].machine_share == 3  # the memory of one machine is not counted three times
    assert knnlm("cluster", "status") == 0
    assert "3 nodes with" in capsys.readouterr().out
    assert knnlm("cluster", "status", store.folder / "nothing") == 1
    assert "is not a datastore" in capsys.readouterr().out


def test_build_command(cluster, own_store, capsys):
    store, _ = own_store
    assert knnlm("cluster", "build", store.folder, "--index", "IVF8,SQfp16", "--ray-address", cluster.address) == 0
    assert (store.folder / "index" / "IVF8_SQfp16" / "index.faiss").exists()


