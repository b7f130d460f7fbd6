"""``knnlm prune``: what it writes, what it refuses, and what is left when it is interrupted."""

import json
import os

import numpy as np
import pytest
from stores import keys_of, make_store

from fairseq_knnlm.cli.main import main
from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.datastore.compact import compact
from fairseq_knnlm.datastore.subsample import subsample
from fairseq_knnlm.errors import Interrupted, KnnlmError
from fairseq_knnlm.pruning import METHODS, PruneOptions, merging, prune, selection
from fairseq_knnlm.pruning.score_files import FOLDER


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "store", 600, of_centre=True, shard=250)


@pytest.fixture
def knnlm(store, tmp_path, capsys):
    """knnlm(words of a command): exit code, and what it printed."""

    def run(*words):
        try:
            code = main([str(word) for word in words])
        except SystemExit as error:
            code = error.code
        found = capsys.readouterr()
        return code, found.out + found.err

    return run


def test_the_command(knnlm, store, tmp_path):
    output = tmp_path / "out"
    code, printed = knnlm("prune", store.folder, "--keep", "0.1", "--method", "merge", "-o", output)
    assert code == 0 and "60 of 600 entries that count 600 together" in printed
    found = Datastore(output)
    drawn = found.manifest.source["subsample"]
    assert found.manifest.weighted and found.manifest.version == 3 and len(found) == 60
    assert (drawn["method"], drawn["fraction"], drawn["of_corpus"], drawn["weights"]) == ("merge", 0.1, 600, True)
    code, printed = knnlm("verify", output)
    assert code == 0 and "ok: weights" in printed
    code, printed = knnlm("info", output)
    assert code == 0 and "600 together" in printed
    code, printed = knnlm("prune", store.folder, "--keep", "0.1", "--method", "merge", "-o", output)
    assert code == 0  # is there already
    code, printed = knnlm("prune", store.folder, "--keep", "0.2", "--method", "merge", "-o", output)
    assert code == 1 and "holds another datastore" in printed and "Traceback" not in printed


def test_averages_unless_told_otherwise(knnlm, store, tmp_path):
    assert knnlm("prune", store.folder, "--keep", "0.3", "-o", tmp_path / "small")[0] == 0
    assert Datastore(tmp_path / "small").manifest.source["subsample"]["method"] == "average"


def test_methods_of_the_command_are_those_of_the_package():
    from fairseq_knnlm.cli import prune_command

    assert tuple(METHODS) == prune_command.METHODS


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--keep", "0", "--method", "random"], "--keep must be above 0 and at most 1, not 0"),
        (["--keep", "1.5", "--method", "random"], "at most 1, not 1.5"),
        (["--keep", "nan", "--method", "random"], "at most 1, not nan"),
        (["--keep", "0.0001", "--method", "merge"], "is none; use a larger --keep"),
        (["--keep", "0.5", "--method", "merged"], "did you mean merge?"),
        (["--keep", "0.5", "--method", "random", "--alpha", "0.1"], "means nothing to random"),
        (["--keep", "0.5", "--method", "retrieved", "--no-weights"], "is for --method merge and average and learned"),
        (["--keep", "0.5", "--method", "learned", "--alpha", "0"], "--alpha must be above 0"),
        (["--keep", "0.5", "--method", "learned", "--updates", "0"], "--updates must be 1 or more"),
        (["--keep", "0.5", "--method", "merge", "--neighbors", "0"], "--neighbors must be 1 or more"),
        (["--keep", "0.5", "--method", "learned", "--window", "-1"], "--window must be 0 or more"),
        (["--keep", "0.5", "--method", "merge", "--index", "IVF2,PQ8x4"], "no inverted lists that hold the keys"),
        (["--keep", "0.5", "--method", "merge", "--index", "flat"], "no inverted lists that hold the keys"),
        (["--keep", "0.5", "--method", "learned", "--queries", "nowhere"], "nowhere is not a datastore"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(knnlm, store, tmp_path, words, sentence):
    code, printed = knnlm("prune", store.folder, *words, "-o", tmp_path / "out")
    assert code in (1, 2) and sentence in printed and "Traceback" not in printed
    assert not (tmp_path / "out").exists()


def test_folders_that_are_taken(knnlm, store, tmp_path):
    words = ["--keep", "0.5", "--method", "random", "-o"]
    assert "another folder than the datastore itself" in knnlm("prune", store.folder, *words, store.folder)[1]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    assert "not empty and not a datastore" in knnlm("prune", store.folder, *words, tmp_path / "full")[1]
    assert os.listdir(tmp_path / "full") == ["letter.txt"]


def test_queries_of_another_text_have_no_window(store, tmp_path):
    other = make_store(tmp_path / "other", 300, seed=4)
    with pytest.raises(KnnlmError, match="--window is for queries that are"):
        prune(store, PruneOptions(0.5, "learned", queries=other, window=3), tmp_path / "out")


@pytest.mark.parametrize("where", ["scoring", "copying"])
def test_interrupted(store, tmp_path, monkeypatch, where):
    """Nothing half-written appears, the datastore is as it was, and the same call finishes."""
    before = {path: path.read_bytes() for path in store.folder.glob("*.npy")}

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "scoring":
            patch.setattr(merging, "merge_rounds", interrupt)
        else:
            patch.setattr("fairseq_knnlm.datastore.subsample.write_positions", interrupt)
        with pytest.raises(Interrupted, match="nothing is lost; run the same command again"):
            prune(store, PruneOptions(0.5, "merge"), tmp_path / "out")
    assert {path: path.read_bytes() for path in store.folder.glob("*.npy")} == before
    if where == "scoring":
        assert not (tmp_path / "out").exists()
        assert not list((store.folder / FOLDER).glob("*/scores.json"))
    else:
        with pytest.raises(KnnlmError, match="incomplete"):
            Datastore(tmp_path / "out")
    found = prune(store, PruneOptions(0.5, "merge"), tmp_path / "out")
    assert len(found) == 300 and found.weights.sum() == 600


def test_scores_are_kept_for_another_share(store, tmp_path, monkeypatch):
    """The work of a method is done once; damage is noticed."""
    prune(store, PruneOptions(0.5, "learned"), tmp_path / "half")
    with monkeypatch.context() as patch:
        patch.setattr(selection, "learn_posterior", None)
        fewer = prune(store, PruneOptions(0.1, "learned"), tmp_path / "tenth")
    assert len(fewer) == 60 and set(fewer.positions) < set(Datastore(tmp_path / "half").positions)
    (scores,) = (store.folder / FOLDER).glob("learned-*/scores.npy")
    data = bytearray(scores.read_bytes())
    data[-1] ^= 1
    scores.write_bytes(data)
    with pytest.raises(KnnlmError, match=r"is damaged .* run knnlm prune again"):
        prune(store, PruneOptions(0.2, "learned"), tmp_path / "fifth")


def test_weights_go_along(tmp_path):
    """Into a part of a datastore and one with smaller keys; damage is found; and a pruned one has an index."""
    store = make_store(tmp_path / "store", 600, weighted=True, shard=250)
    part = subsample(store, 0.4, 1, tmp_path / "part")
    np.testing.assert_array_equal(part.weights, store.weights[part.positions])
    small = compact(part, 16, "int8", tmp_path / "small")
    np.testing.assert_array_equal(small.weights, part.weights)
    np.testing.assert_array_equal(small.positions, part.positions)
    path = small.folder / "weights-00000.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x80  # the sign
    path.write_bytes(data)
    damaged = Datastore(small.folder)
    assert dict(damaged.damaged_files())["weights-00000.npy"]
    with pytest.raises(KnnlmError, match="not positive numbers, so a file is damaged"):
        _ = damaged.weights
    path.unlink()
    with pytest.raises(KnnlmError, match=r"weights-00000\.npy is missing"):
        Datastore(small.folder)


def test_version_2_is_read(store):
    """A manifest of the release before does not know weights."""
    path = store.folder / "manifest.json"
    content = json.loads(path.read_text())
    for name in ("weighted", "checksum"):
        content.pop(name)
    for shard in content["shards"]:
        shard.pop("weights_sha256")
    content["version"] = 2
    path.write_text(json.dumps(content))
    old = Datastore(store.folder)
    assert old.weights is None and not old.is_weighted and len(keys_of(old)) == 600


def test_a_manifest_that_contradicts_itself(tmp_path):
    store = make_store(tmp_path / "store", 300, weighted=True)
    path = store.folder / "manifest.json"
    content = json.loads(path.read_text())
    content["weighted"] = False
    content.pop("checksum")
    path.write_text(json.dumps(content))
    with pytest.raises(KnnlmError, match="the weights of some shards are missing or too many"):
        Datastore(store.folder)


def test_a_head_is_not_learnt_from_weights(tmp_path):
    from fairseq_knnlm.heads.making import Material, Wanted, learn_head
    from fairseq_knnlm.heads.objective import Objective

    store = make_store(tmp_path / "store", 300, weighted=True)
    with pytest.raises(KnnlmError, match="a head would count each of them once"):
        learn_head(tmp_path / "head", store, Wanted(), Material(Objective()))
