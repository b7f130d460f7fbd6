"""Reading with few file descriptors."""

import errno
import os
import sys

import pytest
from commands import run
from stores import make_store

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.errors import KnnlmError


def test_few_file_descriptors(tmp_path):
    """100 shards, which are 200 files, with 64 descriptors; twice."""
    make_store(tmp_path / "store", 1000, shard=10)
    script = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import numpy as np
from fairseq_knnlm.datastore import Datastore
stores = [Datastore({str(tmp_path / "store")!r}) for _ in range(2)]
keys = np.concatenate(list(stores[0].key_blocks()))
ids = np.random.default_rng(0).permutation(1000)
for store in stores:
    assert (store.gather_keys(ids) == keys[ids]).all() and len(store.values) == 1000
assert not any(damaged for _, damaged in store.damaged_files())
"""
    run(sys.executable, "-c", script)


def test_a_limit_is_not_damage(store, monkeypatch):
    real = open

    def limited(path, *arguments, **options):
        if str(path).endswith(".npy"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr("builtins.open", limited)
    with pytest.raises(KnnlmError, match="ulimit -n") as error:
        Datastore(store.folder)
    assert "delete" not in str(error.value)
