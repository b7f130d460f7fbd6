"""A random part of a datastore is a datastore."""

import numpy as np
from commands import error_of, knnlm
from reference import has_tie, knn_probability, load, mixture

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.datastore.subsample import subsample


def test_subsample(dump, tmp_path, capsys):
    source = dump("train")
    assert knnlm("subsample", source, "--fraction", "0.1", "--seed", "3", "-o", tmp_path / "part") == 0
    whole, part = Datastore(source), Datastore(tmp_path / "part")
    positions = np.load(tmp_path / "part/positions.npy")
    assert len(part) == round(0.1 * len(whole)) == len(np.unique(positions))
    np.testing.assert_array_equal(part.values, whole.values[positions])
    np.testing.assert_array_equal(np.concatenate(list(part.key_blocks())), whole.gather_keys(positions))
    assert knnlm("verify", tmp_path / "part") == 0
    # nothing is shared: the copy survives the original, and the original any damage to the copy
    files = {path.stat().st_ino for path in source.rglob("*")} & {path.stat().st_ino for path in part.folder.rglob("*")}
    assert not files
    again = tmp_path / "again"
    assert knnlm("subsample", source, "--fraction", "0.1", "--seed", "3", "-o", again) == 0
    assert Datastore(again).fingerprint == part.fingerprint
    assert "another dump" in error_of(capsys, "subsample", source, "--fraction", "0.2", "-o", again)
    assert "above 0" in error_of(capsys, "subsample", source, "--fraction", "0", "-o", tmp_path / "x")
    assert "is none" in error_of(capsys, "subsample", source, "--fraction", "1e-9", "-o", tmp_path / "x")
    assert "another folder" in error_of(capsys, "subsample", source, "--fraction", "0.5", "-o", source)


def test_scoring_with_a_subsample(dump, evaluate, corpus, adaptive_model, tmp_path):
    """The neighbours are those among the entries that are left."""
    part = subsample(Datastore(dump("train")), 0.5, 1, tmp_path / "part")
    flags = ("--knn-k", "16", "--knn-lambda", "0.3", "--knn-temperature", "1")
    ours = evaluate(corpus, adaptive_model, "--knn-datastore", part.folder, *flags)
    lm = evaluate(corpus, adaptive_model).scores
    queries, targets = load(Datastore(dump("valid", "--knn-key-dtype", "float32")))
    keys, values = load(part)
    clear = ~has_tie(queries, keys, 16)
    assert clear.mean() > 0.95
    expected = mixture(lm, [knn_probability(queries, targets, keys, values, 16)], [0.3])
    np.testing.assert_allclose(ours.scores[clear], expected[clear], atol=1e-4)


def test_positions_of_a_subsample_of_a_subsample(store, tmp_path):
    half = subsample(store, 0.5, 1, tmp_path / "half")
    quarter = subsample(half, 0.5, 2, tmp_path / "quarter")
    np.testing.assert_array_equal(store.gather_keys(np.asarray(quarter.positions)), quarter.gather_keys(np.arange(750)))
    np.testing.assert_array_equal(store.values[quarter.positions], quarter.values)
