"""Compact keys from the dump to the score, by the real commands, against brute force."""

import shutil

import numpy as np
import pytest
from commands import knnlm, make_table, sentence_of
from reference import has_tie, knn_probability, load, mixture

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.datastore.key_codec import KeyForm, learn_codec

COMPACT = ("--knn-key-dim", 16, "--knn-key-dtype", "int8")


@pytest.fixture(scope="session")
def states(dump):
    """The states of the valid split in full precision, and its targets."""
    return load(Datastore(dump("valid", "--knn-key-dtype", "float32")))


@pytest.mark.parametrize("form", [COMPACT, ("--knn-key-dtype", "int8"), ("--knn-key-dim", 16)])
@pytest.mark.parametrize(
    ("k", "temperature", "metric", "flags"),
    [
        ("all", 5.0, "l2", ("--knn-index", "flat")),
        ("all", 5.0, "l2", ("--knn-nprobe", 16)),
        ("all", 5.0, "ip", ("--knn-nprobe", 16)),
        (16, 1.0, "l2", ("--knn-nprobe", 16)),
    ],
)
def test_mixture_equals_brute_force(
    evaluate, corpus, adaptive_model, dump, states, form, k, temperature, metric, flags
):
    store = Datastore(dump("train", *form))
    codes = "SQ8" if store.manifest.key_dtype == "int8" else "SQfp16"
    flags = flags if "flat" in flags else ("--knn-index", f"IVF16,{codes}", *flags)
    ours = evaluate(
        corpus, adaptive_model, "--knn-datastore", store.folder, "--knn-k", k, "--knn-temperature", temperature,
        "--knn-metric", metric, "--knn-lambda", "0.3", *flags,
    )  # fmt: skip
    keys, values = load(store)
    queries, k = store.codec.project(states[0]), len(keys) if k == "all" else k
    p_knn = knn_probability(queries, states[1], keys, values, k, temperature, metric)
    clear = ~has_tie(queries, keys, k, metric)
    lm = evaluate(corpus, adaptive_model).scores
    np.testing.assert_allclose(ours.scores[clear], mixture(lm, [p_knn], [0.3])[clear], atol=2e-4)


def test_what_is_stored_is_learnt_from_the_same_split(dump):
    full, small = Datastore(dump("train", "--knn-key-dtype", "float32")), Datastore(dump("train", *COMPACT))
    keys = np.concatenate(list(full.key_blocks()))
    codec, projection, quantizer = learn_codec(keys, KeyForm(keys.shape[1], 16, "int8"))
    np.testing.assert_allclose(small.codec.projection, codec.projection, atol=1e-4)
    assert small.manifest.projection.variance_kept == pytest.approx(projection.variance_kept, abs=1e-5)
    assert small.manifest.quantizer.error == pytest.approx(quantizer.error, rel=0.01)
    np.testing.assert_array_equal(small.values, full.values)


def test_parts_and_batches_give_the_same_keys(dump, evaluate, corpus, adaptive_model, tmp_path):
    """One process learns the codec, the other uses it; the size of a batch changes nothing."""
    whole = Datastore(dump("train", *COMPACT))
    for part in (1, 0):
        flags = ("--knn-dump", tmp_path / "parts", *COMPACT, "--num-shards", 2, "--shard-id", part)
        evaluate(corpus, adaptive_model, *flags, "--max-tokens", 256, split="train")
    parts = Datastore(tmp_path / "parts")
    ours, theirs = (np.concatenate(list(store.stored_blocks())).astype(int) for store in (whole, parts))
    assert (ours != theirs).mean() < 0.002 and np.abs(ours - theirs).max() <= 1  # a rounding at the edge of a step


def test_commands(dump, tmp_path, capsys):
    def printed(*command) -> str:
        assert knnlm(*command) == 0
        return capsys.readouterr().out

    small = tmp_path / "small"
    assert "16 x int8" in printed("compact", dump("train"), "--dim", 16, "-o", small)
    printed("build", small, "--index", "IVF16,SQ8", "--drop-keys")
    assert not list(small.glob("keys-*"))
    text = printed("info", small)
    assert "of the variance" in text and "only in the index IVF16_SQ8" in text and "bytes with all indexes" in text
    assert "all is well" in printed("verify", "--all", small)


def test_what_reads_keys_in_order_works_without_them(evaluate, corpus, adaptive_model, dump, tmp_path):
    """Every command on a datastore whose lists are the only copy of its keys makes what it makes of the whole one."""
    stores = [shutil.copytree(dump("train", *COMPACT), tmp_path / name) for name in ("whole", "dropped")]
    assert knnlm("build", stores[0], "--index", "IVF16,SQ8") == 0
    assert knnlm("build", stores[1], "--index", "IVF16,SQ8", "--drop-keys") == 0
    for command, *flags in (("subsample", "--fraction", "0.5", "--seed", "1"), ("prune", "--keep", "0.5")):
        assert_made_alike(stores, command, *flags)
    for store in stores:
        assert make_table(store, store, tmp_path / f"{store.name}-table") == 0
    tables = [sorted((tmp_path / f"{store.name}-table").glob("*.npy")) for store in stores]
    assert tables[0] and all(one.read_bytes() == other.read_bytes() for one, other in zip(*tables))
    for flags in ((), ("--knn-mask", "exact", "--knn-k", "8")):
        one, other = (evaluate(corpus, adaptive_model, "--knn-datastore", store, *flags) for store in stores)
        np.testing.assert_allclose(one.scores, other.scores, atol=2e-5)  # keys are read in another order


def test_keys_that_are_only_in_lists_can_be_made_compact(dump, tmp_path):
    stores = [shutil.copytree(dump("train"), tmp_path / name) for name in ("whole", "dropped")]
    assert knnlm("build", stores[1], "--index", "IVF16,SQfp16", "--drop-keys") == 0
    assert not list(stores[1].glob("keys-*"))
    assert_made_alike(stores, "compact", "--dim", "8")


def assert_made_alike(stores, command, *flags):
    """A command makes the same keys and values of each of two datastores."""
    made = [store.with_name(f"{store.name}-{command}") for store in stores]
    for store, output in zip(stores, made):
        assert knnlm(command, store, *flags, "-o", output) == 0
    one, other = (Datastore(output) for output in made)
    np.testing.assert_array_equal(*(np.concatenate(list(each.stored_blocks())) for each in (one, other)))
    np.testing.assert_array_equal(one.values, other.values)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--knn-key-dtype", "int8"), "--knn-key-dtype does nothing without --knn-dump"),
        (("--knn-key-dim", 8), "--knn-key-dim does nothing without --knn-dump"),
        (("--knn-far", 8, "--knn-k", 8), "--knn-far goes with --knn-k all"),
        (("--knn-far", -1, "--knn-k", "all"), "--knn-far must be 0 or more, not -1"),
        (("--knn-device", "cuda"), "--knn-device cuda is not there: this machine has no GPU"),
        (("--knn-device", "gpu"), "--knn-device takes auto, cpu, cuda or cuda:N, or several GPUs"),
    ],
)
def test_bad_flags(evaluate, corpus, adaptive_model, dump, flags, message):
    assert message in sentence_of(evaluate, corpus, adaptive_model, "--knn-datastore", dump("train"), *flags)


@pytest.mark.parametrize("dim", [0, 65])
def test_impossible_dimension(evaluate, corpus, adaptive_model, tmp_path, dim):
    flags = ("--knn-dump", tmp_path / "store", "--knn-key-dim", dim)
    assert f"--knn-key-dim {dim} is not possible" in sentence_of(evaluate, corpus, adaptive_model, *flags)
    assert not (tmp_path / "store").exists()
