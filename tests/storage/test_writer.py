"""The one writer: a temporary name, sync, rename, and nothing of others removed."""

import os
import re

import pytest
from commands import REPO
from stores import make_store

from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.storage import Lock, OutputFile, remove_stale_files


def test_only_left_over_files_are_removed(tmp_path):
    alive = OutputFile(tmp_path / "a.npy")
    killed = OutputFile(tmp_path / "b.npy")
    os.close(killed._descriptor)  # as the kernel does
    killed._descriptor = -1
    (tmp_path / "mine.tmp").write_text("precious")
    remove_stale_files(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {alive.temporary.name, "mine.tmp"}
    alive.abort()


def test_locks_of_killed_processes_are_removed(tmp_path):
    """A process can be killed between its last file and the release of its lock; nobody takes that lock again."""
    (tmp_path / "shard-00003.lock").write_text("another process (1 on nowhere)")
    (tmp_path / "shard-00004.lock").write_text("")
    (tmp_path / "mine.lock").write_text("precious")
    with Lock(tmp_path / "manifest.json.lock", "writing"):
        remove_stale_files(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"manifest.json.lock", "mine.lock"}
    assert {path.name for path in tmp_path.iterdir()} == {"mine.lock"}


def test_every_file_and_folder_is_synced(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.readlink(f"/proc/self/fd/{descriptor}")),
                                                         real(descriptor)))  # fmt: skip
    make_store(tmp_path / "store", 100)
    files = [re.sub(r"\.[0-9a-f]{12}\.tmp$", "", path) for path in synced]
    for name in ("manifest.json", "keys-00000.npy", "values-00000.npy", "shard-00000.json"):
        place = files.index(str(tmp_path / "store" / name))
        assert files[place + 1] == str(tmp_path / "store")  # the folder right after the file


def test_there_is_one_writer():
    """Nothing outside storage/ renames files or opens them for writing."""
    own_way = re.compile(r"os\.(replace|rename)\(|\.write_(text|bytes)\(|open\([^)]*[\"'][wax]b?\+?[\"']")
    package = REPO / "fairseq_knnlm"
    found = {
        str(path.relative_to(package)): own_way.findall(path.read_text())
        for path in package.rglob("*.py")
        if "storage" not in path.parts and own_way.search(path.read_text())
    }
    assert found == {}


def test_a_forked_process_leaves_the_files_of_its_parent_alone(tmp_path):
    """A worker of a data loader has copies of everything that its parent has open."""
    file, lock = OutputFile(tmp_path / "a.txt"), Lock(tmp_path / "a.lock", "writing", wait=False)
    lock.acquire()
    file.write(b"whole")
    child = os.fork()
    if child == 0:
        del file, lock
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(KnnlmError, match="another process"):
        Lock(tmp_path / "a.lock", "writing", wait=False).acquire()
    file.commit()
    lock.release()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"] and (tmp_path / "a.txt").read_bytes() == b"whole"
