"""knnlm import: what it copies, and scores with it."""

import faiss
import numpy as np
import pytest

from fairseq_knnlm.cli import main
from fairseq_knnlm.datastore import Datastore


@pytest.fixture
def original(dump, tmp_path):
    """What the original implementation writes for the same corpus."""
    datastore = Datastore(dump("train"))
    keys = np.concatenate(list(datastore.key_blocks()))

    def write(key_dtype, value_dtype):
        keys.astype(key_dtype).tofile(tmp_path / "dstore_keys.npy")
        datastore.values.astype(value_dtype).tofile(tmp_path / "dstore_vals.npy")
        return str(tmp_path / "dstore"), keys, datastore.values

    return write


@pytest.mark.parametrize(("key_dtype", "value_dtype"), [("float16", "int16"), ("float32", "int64")])
def test_import(original, corpus, tmp_path, key_dtype, value_dtype):
    prefix, keys, values = original(key_dtype, value_dtype)
    output = tmp_path / "imported"
    arguments = ["import", prefix, "-o", str(output), "--dict", str(corpus / "dict.txt"), "--dim", "64"]
    assert main(arguments) == 0
    datastore = Datastore(output)
    np.testing.assert_array_equal(np.concatenate(list(datastore.key_blocks())), keys)
    np.testing.assert_array_equal(datastore.values, values)
    assert main(["verify", str(output)]) == 0


def test_imported_datastore_scores_like_ours(original, evaluate, corpus, adaptive_model, dump, tmp_path):
    prefix, keys, _ = original("float16", "int16")
    index = faiss.index_factory(64, "IVF16,PQ8")
    index.do_polysemous_training = False  # which takes most of the time
    index.train(keys.astype(np.float32))
    index.add(keys.astype(np.float32))
    faiss.write_index(index, str(tmp_path / "knn.index"))
    output = tmp_path / "imported"
    arguments = ["import", prefix, "-o", str(output), "--dict", str(corpus / "dict.txt")]
    assert main([*arguments, "--index", str(tmp_path / "knn.index")]) == 0  # the index tells the sizes
    flags = ("--knn-k", "all", "--knn-temperature", "1")
    ours = evaluate(corpus, adaptive_model, "--knn-datastore", dump("train"), *flags, "--knn-index", "flat")
    theirs = evaluate(
        corpus, adaptive_model, "--knn-datastore", output, *flags, "--knn-index", "imported", "--knn-nprobe", "16"
    )
    assert theirs.loss == pytest.approx(ours.loss, abs=1e-5)


def test_import_refuses_what_does_not_fit(original, corpus, tmp_path, capsys):
    prefix, *_ = original("float16", "int16")
    arguments = ["import", prefix, "-o", str(tmp_path / "imported"), "--dict", str(corpus / "dict.txt")]
    assert main([*arguments, "--dim", "48"]) == 1
    assert "do not fit together" in capsys.readouterr().err
    assert main([*arguments, "--dim", "64", "--key", "brain"]) == 1
    assert "--key brain is unknown" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "nothing"), *arguments[2:]]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()
