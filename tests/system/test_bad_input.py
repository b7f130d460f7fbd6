"""What a user can get wrong: one clear sentence, an exit code that is not zero, and nothing damaged."""

import json
import pickle
import re
import shutil
import subprocess
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch
from commands import eval_lm, eval_lm_here, fails_with, preprocess_here, run, sentence_of

from fairseq_knnlm.datastore import Datastore, Manifest


@pytest.fixture
def score(evaluate, corpus, adaptive_model, dump):
    """Score with flags that are wrong; the datastore of the other tests stays as it was."""

    def attempt(*flags, model=None, data=None, store=None):
        store = store or dump("train")
        before = {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file()}
        sentence = sentence_of(evaluate, data or corpus, model or adaptive_model, "--knn-datastore", store, *flags)
        assert all(path.stat().st_mtime_ns == modified for path, modified in before.items())
        return sentence

    return attempt


@pytest.fixture
def copy(dump, tmp_path):
    shutil.copytree(dump("train"), tmp_path / "copy")
    return tmp_path / "copy"


def test_as_a_process(corpus, adaptive_model, tmp_path):
    """The real command: one sentence on standard error, no traceback."""
    result = eval_lm(corpus, adaptive_model, "--knn-datastore", tmp_path / "nothing", check=False)
    fails_with(result, "is not a datastore", "--knn-dump")


def test_half_written_datastore(score, copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["complete"] = False
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert "incomplete" in score(store=copy)


def test_other_format_version(score, copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["version"] = 99
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert "format version 99" in score(store=copy)


def test_truncated_shard(score, copy):
    path = copy / "keys-00003.npy"
    path.write_bytes(path.read_bytes()[:-100])
    assert "keys-00003.npy is truncated" in score(store=copy)


def test_corrupt_index(score, evaluate, corpus, adaptive_model, copy):
    evaluate(corpus, adaptive_model, "--knn-datastore", copy, "--knn-index", "IVF16,PQ8")
    path = copy / "index" / "IVF16_PQ8" / "index.faiss"
    path.write_bytes(b"x" * path.stat().st_size)
    assert "knnlm build" in score("--knn-index", "IVF16,PQ8", store=copy)


def test_other_dictionary(score, corpus, tmp_path):
    """Of the same size, so that it loads into the model: the same types in another order."""
    data = tmp_path / "bin"
    shutil.copytree(corpus, data)
    lines = (data / "dict.txt").read_text().splitlines()
    (data / "dict.txt").write_text("\n".join(reversed(lines)) + "\n")
    assert "another dictionary" in score(data=data)


def test_other_checkpoint(score, plain_model):
    assert "another checkpoint" in score(model=plain_model)


def test_wrong_dimension(score, copy):
    manifest = Manifest.load(copy)
    for shard in manifest.shards:
        keys = np.load(copy / shard.keys_name)
        np.save(copy / shard.keys_name, np.ascontiguousarray(keys[:, :32]))
    manifest.dim = 32
    manifest.save(copy)
    assert "dimension 32, the model 64" in score(store=copy)


def test_other_key_or_layer(score):
    assert "holds the key ffn_input_ln, not output" in score("--knn-key", "output")
    assert "keys of layer 1, not 0" in score("--knn-layer", "0")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--knn-lambda", "1.5"), "--knn-lambda"),
        (("--knn-lambda", "0.1,0.2"), "2 values for 1 datastores"),
        (("--knn-lambda", "much"), "takes numbers"),
        (("--knn-k", "0"), "--knn-k"),
        (("--knn-k", "many"), "--knn-k"),
        (("--knn-temperature", "0"), "--knn-temperature"),
        (("--knn-nprobe", "0"), "--knn-nprobe"),
        (("--knn-index", "bestest"), "neither a preset"),
        (("--knn-index", "HNSW8", "--knn-k", "all"), "--knn-k all"),
        (("--knn-dump", "/nowhere"), "two runs"),
    ],
)
def test_flags(score, flags, message):
    assert message in score(*flags)


def test_lambdas_above_one(evaluate, corpus, adaptive_model, dump):
    stores = f"{dump('train')},{dump('test')}"
    sentence = sentence_of(evaluate, corpus, adaptive_model, "--knn-datastore", stores, "--knn-lambda", "0.6,0.6")
    assert "sum at most 1" in sentence


@pytest.mark.parametrize("flags", [("--knn-lambda", "0.3"), ("--knn-key", "output"), ("--knn-metric", "ip")])
def test_flags_without_a_datastore(evaluate, corpus, adaptive_model, flags):
    assert f"{flags[0]} does nothing" in sentence_of(evaluate, corpus, adaptive_model, *flags)


def test_unknown_key(corpus, adaptive_model, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        eval_lm_here(corpus, adaptive_model, "--knn-dump", tmp_path / "store", "--knn-key", "brain")
    assert error.value.code == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in sentence and "--knn-key" in sentence and "ffn_input_ln" in sentence
    assert not (tmp_path / "store").exists()


def test_missing_and_empty_split(evaluate, corpus, adaptive_model, tmp_path):
    assert "there is no split" in sentence_of(evaluate, corpus, adaptive_model, split="nothing")
    (tmp_path / "empty").write_text("")
    data = preprocess_here(tmp_path / "bin", corpus / "dict.txt", valid=tmp_path / "empty")
    assert "is empty" in sentence_of(evaluate, data, adaptive_model)


def test_windows(evaluate, corpus, adaptive_model):
    assert "larger than --context-window" in sentence_of(evaluate, corpus, adaptive_model, "--context-window", "64")
    assert "do not fit" in sentence_of(
        evaluate, corpus, adaptive_model, "--tokens-per-sample", "200", "--context-window", "0"
    )


def test_post_norm_model(evaluate, corpus, post_norm_model, tmp_path):
    sentence = sentence_of(evaluate, corpus, post_norm_model, "--knn-dump", tmp_path / "store")
    assert "post-norm" in sentence and not (tmp_path / "store").exists()


def test_layer_that_does_not_exist(evaluate, corpus, adaptive_model, tmp_path):
    sentence = sentence_of(evaluate, corpus, adaptive_model, "--knn-dump", tmp_path / "s", "--knn-layer", "2")
    assert "the model has 2 layers" in sentence


def test_nan_and_overflowing_keys(evaluate, corpus, adaptive_model, tmp_path):
    for name, value, message in (("nan", float("nan"), "NaN"), ("big", 1e6, "--knn-key-dtype float32")):
        state = torch.load(adaptive_model)
        state["model"]["decoder.layers.1.final_layer_norm.weight"][:] = value
        torch.save(state, tmp_path / f"{name}.pt")
        sentence = sentence_of(evaluate, corpus, tmp_path / f"{name}.pt", "--knn-dump", tmp_path / name)
        assert message in sentence
        assert not list((tmp_path / name).glob("keys-*"))


def test_resuming_another_dump(evaluate, corpus, adaptive_model, copy):
    dumping = ["--knn-dump", copy, "--context-window", "16"]
    sentence = sentence_of(evaluate, corpus, adaptive_model, *dumping, split="train")
    assert "holds another dump (context_window 32 there, 16 here" in sentence
    Datastore(copy)


def test_disk_too_small(evaluate, corpus, adaptive_model, tmp_path):
    """A real file system that cannot hold the datastore (test_datastore.py fills one up under our hands)."""
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", mount], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        sentence = sentence_of(evaluate, corpus, adaptive_model, "--knn-dump", mount / "store", split="train")
        assert re.search(r"needs .* but .* has .* free", sentence)
    finally:
        subprocess.run(["umount", mount], check=True)


def test_old_checkpoint_with_a_namespace(evaluate, corpus, adaptive_model, tmp_path):
    """Checkpoints of old keep their configuration in an argparse.Namespace."""
    state = torch.load(adaptive_model)
    cfg = state.pop("cfg")
    model = {name: value for name, value in cfg["model"].items() if not isinstance(value, dict)}
    model.pop("_name", None)
    state["args"] = Namespace(
        arch="transformer_lm", task="language_modeling", criterion="adaptive_loss", **{"data": str(corpus), **model}
    )
    torch.save(state, tmp_path / "old.pt")
    assert evaluate(corpus, tmp_path / "old.pt").loss == pytest.approx(evaluate(corpus, adaptive_model).loss, abs=1e-6)


def test_checkpoint_cannot_run_code(corpus, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "pwned"), "w"))

    torch.save({"args": Evil(), "model": {}}, tmp_path / "evil.pt")
    with pytest.raises(pickle.UnpicklingError):
        eval_lm_here(corpus, tmp_path / "evil.pt")
    assert not (tmp_path / "pwned").exists()


def test_without_faiss(tmp_path):
    """A fairseq-knnlm without an extra says which to install."""
    script = (
        "import sys, importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'faiss' else real(name, *a)\n"
        "import fairseq_knnlm.tasks"
    )
    fails_with(run(sys.executable, "-c", script, check=False), "faiss is missing", "pip install")


def test_bad_cache_and_save_flags(corpus, adaptive_model, dump, tmp_path):
    def sentence(*flags) -> str:
        return sentence_of(eval_lm_here, corpus, adaptive_model, "--gen-subset", "valid", *flags)

    assert "without --knn-cache-size" in sentence("--knn-cache-theta", "2")
    assert "0 or more" in sentence("--knn-cache-size", "-5")
    assert "0 or more" in sentence("--knn-cache-size", "5", "--knn-cache-theta", "-1")
    knn = ["--knn-datastore", dump("train"), "--knn-lambda", "0.8"]
    assert "at most 1 together" in sentence(*knn, "--knn-cache-size", "5", "--knn-cache-lambda", "0.3")
    assert "not in the dictionary" in sentence("--knn-cache-size", "5", "--knn-cache-boundary", "no such word")
    assert "no line of the text" in sentence("--knn-cache-size", "5", "--knn-cache-boundary", "w1 w1 w1 w1 w1")
    assert "regular expression" in sentence("--knn-cache-size", "5", "--knn-cache-boundary", "re:(")
    assert "are for scoring" in sentence("--knn-dump", tmp_path / "dump", "--knn-cache-size", "5")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("precious")
    assert "exists already" in sentence("--knn-save", tmp_path / "mine")
    assert (tmp_path / "mine/file").read_text() == "precious"
