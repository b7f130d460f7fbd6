"""One process at a time works on a thing; a lock goes with its holder."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest
from commands import REPO

from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.storage import Lock, write_json


def test_file_systems_without_locks(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(KnnlmError, match=r"has no file locks .*KNNLM_NO_LOCKS=1"), Lock(tmp_path / "x.lock", "writing"):
        pass
    monkeypatch.setenv("KNNLM_NO_LOCKS", "1")
    with Lock(tmp_path / "x.lock", "writing"):
        write_json(tmp_path / "x.json", {})


def test_a_lock_is_freed_when_its_holder_dies(tmp_path):
    script = f"""
import time
from fairseq_knnlm.storage import Lock
from pathlib import Path
lock = Lock(Path({str(tmp_path / "x.lock")!r}), "writing")
lock.acquire()
print("locked", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=REPO) as process:
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(KnnlmError, match=rf"another process .{process.pid} on .* is writing; wait for it"):
            Lock(tmp_path / "x.lock", "writing", wait=False).acquire()
        process.kill()
        process.wait()
    with Lock(tmp_path / "x.lock", "writing", wait=False):
        pass
    assert not list(tmp_path.iterdir())
