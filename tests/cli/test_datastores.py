"""knnlm build, info and verify."""

import json
import shutil

import pytest
from commands import error_of, knnlm

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.index import build_index, checking


def test_build_info_verify(dump, tmp_path, capsys):
    store = shutil.copytree(dump("train"), tmp_path / "store")
    assert knnlm("build", store, "--index", "IVF16,PQ8") == 0
    assert knnlm("info", store) == 0
    text = capsys.readouterr().out
    assert "ffn_input_ln of layer 1" in text and "index IVF16_PQ8" in text
    assert knnlm("info", store, "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["entries"] == len(Datastore(store))
    assert "IVF16,PQ8" in [index["factory"] for index in content["indexes"]]
    assert knnlm("verify", store) == 0
    assert "all is well" in capsys.readouterr().out
    keys = store / "keys-00001.npy"
    data = bytearray(keys.read_bytes())
    data[-1] ^= 1
    keys.write_bytes(data)
    assert knnlm("verify", store) == 1
    assert "keys-00001.npy" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["info", "verify", "build"])
def test_errors_are_one_sentence(tmp_path, capsys, command):
    assert "is not a datastore" in error_of(capsys, command, tmp_path / "nothing")


def test_verify_says_that_it_samples(store, capsys, monkeypatch):
    build_index(store, "IVF16,SQfp16", "l2")
    monkeypatch.setattr(checking, "SAMPLED_ENTRIES", 1000)
    assert knnlm("verify", store.folder) == 0
    assert "sampled; --all checks every one" in capsys.readouterr().out
    assert knnlm("verify", "--all", store.folder) == 0
    assert "sampled" not in capsys.readouterr().out
