"""knnlm import: what it deduces, and everything that it must refuse."""

import logging
import os
import threading
from pathlib import Path

import faiss
import numpy as np
import pytest

from fairseq_knnlm.cli import main
from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.index import build_index_if_missing, extract_ivf, list_indexes, open_index
from fairseq_knnlm.original import importer
from fairseq_knnlm.storage import system

ROWS, DIM, WORDS = 4000, 64, 1000
DTYPES = [("float16", "int16"), ("float16", "int64"), ("float32", "int32"), ("float32", "int64")]


def states(rows: int = ROWS, dim: int = DIM, seed: int = 0) -> np.ndarray:
    """Numbers like layer-normed states: every column has a scale and a mean of its own, (rows, dim) float32."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(rows, dim)) * np.exp(rng.normal(0, 0.4, dim)) + rng.normal(0, 0.5, dim)).astype(np.float32)


def write_dictionary(path: Path, words: int) -> Path:
    path.write_text("".join(f"w{number} {words - number}\n" for number in range(words)))
    return path


class Store:
    """A store of the original implementation in a folder, and the command that imports it."""

    def __init__(self, folder: Path):
        self.folder, self.output = folder, folder / "imported"
        self.dictionary = write_dictionary(folder / "dict.txt", WORDS)
        self.keys_path, self.values_path = folder / "dstore_keys.npy", folder / "dstore_vals.npy"

    def write(self, keys=None, values=None, key_dtype="float16", value_dtype="int16") -> "Store":
        self.keys = (states() if keys is None else keys).astype(key_dtype)
        if values is None:
            values = np.random.default_rng(1).integers(4, WORDS + 4, len(self.keys))
        self.values = values
        self.keys.tofile(self.keys_path)
        values.astype(value_dtype)[:, None].tofile(self.values_path)
        return self

    def write_index(self, factory="IVF16,PQ8", ids=None, name="knn.index") -> Path:
        keys = self.keys.astype(np.float32)
        index = faiss.index_factory(keys.shape[1], factory)
        if "PQ8" in factory:
            extract_ivf(index).do_polysemous_training = False  # which takes most of the time
        if "OPQ" in factory:
            faiss.downcast_VectorTransform(index.chain.at(0)).niter = 2  # which takes the rest
        index.train(keys)
        index.add_with_ids(keys, np.arange(len(keys)) if ids is None else ids)
        faiss.write_index(index, str(self.folder / name))
        return self.folder / name

    def run(self, *flags) -> int:
        prefix, dictionary = str(self.folder / "dstore"), str(self.dictionary)
        return main(["import", prefix, "-o", str(self.output), "--dict", dictionary, *map(str, flags)])


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def refused(store, capsys):
    """refused(parts, *flags): the import fails with one sentence that contains the parts, and leaves no folder."""

    def check(parts: list[str], *flags, new: bool = True) -> str:
        capsys.readouterr()
        assert store.run(*flags) == 1
        sentence = capsys.readouterr().err.strip().splitlines()[-1]
        assert sentence.startswith("error: ")
        for part in parts:
            assert part in sentence
        assert not (new and store.output.exists())
        return sentence

    return check


def assert_imported(store: Store, rows: int = ROWS) -> Datastore:
    datastore = Datastore(store.output)
    np.testing.assert_array_equal(np.concatenate(list(datastore.key_blocks())), store.keys[:rows])
    np.testing.assert_array_equal(datastore.values, store.values[:rows])
    assert datastore.manifest.key_dtype == store.keys.dtype
    return datastore


# --- the layout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 100, 256])
@pytest.mark.parametrize(("key_dtype", "value_dtype"), DTYPES)
def test_sizes_and_dtypes_are_deduced(store, caplog, dim, key_dtype, value_dtype):
    store.write(states(dim=dim), key_dtype=key_dtype, value_dtype=value_dtype)
    with caplog.at_level(logging.INFO):
        assert store.run() == 0
    assert_imported(store)
    line = next(message for message in caplog.messages if "entries, keys of" in message)
    assert f"4,000 entries, keys of {dim} {key_dtype}, values of {value_dtype} (as " in line
    assert any("--path CHECKPOINT would let it be checked" in message for message in caplog.messages)


def test_float32_that_was_float16_once(store):
    store.write(states().astype(np.float16), key_dtype="float32", value_dtype="int64")
    assert store.run() == 0
    assert_imported(store)


def test_index_and_flags_are_used_and_compared(store, refused):
    store.write()
    index = store.write_index()
    refused(["the dimension of the keys is not clear (--dim 128, the index 64)"], "--dim", 128, "--index", index)
    refused(["do not fit together with --dim 48"], "--dim", 48)
    refused(["do not fit together with --dtype float32"], "--dtype", "float32")
    refused(["--size 5,000 is more than the 4,000 entries"], "--size", 5000)
    refused(["--size must be 1 or more"], "--size", 0)
    assert store.run("--index", index, "--dtype", "float16") == 0
    assert_imported(store)


def test_what_stays_ambiguous_names_the_flag(store, refused):
    store.write(np.ones((ROWS, DIM)))  # says nothing
    refused(["can be read as keys of 64 float16 or 32 float32; say which with --dtype"])
    assert store.run("--dtype", "float16") == 0
    assert_imported(store)


@pytest.mark.parametrize(("key_dtype", "value_dtype"), DTYPES)
@pytest.mark.parametrize("flags", [(), ("--dim", DIM)])
@pytest.mark.parametrize("which", ["keys_path", "values_path"])
def test_truncated_files(store, refused, key_dtype, value_dtype, flags, which):
    store.write(key_dtype=key_dtype, value_dtype=value_dtype)
    path = getattr(store, which)
    whole = path.read_bytes()
    for parts in (2, 4):
        path.write_bytes(whole[: len(whole) // parts])
        refused(["do not fit together", "none is truncated"], *flags)
    path.write_bytes(whole[:-6])
    refused(["not"], *flags)
    path.write_bytes(b"")
    refused(["do not fit together"], *flags)


# --- values ---------------------------------------------------------------------------------------------------------


def test_int16_that_wrapped_around(store, refused):
    write_dictionary(store.dictionary, 70_000)
    tokens = np.random.default_rng(1).integers(4, 70_004, ROWS)
    store.write(values=tokens)
    refused(["int16", "70,004 types", "wrapped around", "without --dstore-fp16", "--knn-dump"])
    store.write(values=tokens, value_dtype="int64")
    assert store.run() == 0
    assert_imported(store)


def test_int16_that_went_negative(store):
    write_dictionary(store.dictionary, 60_000)
    store.write(values=np.random.default_rng(1).integers(4, 60_004, ROWS))
    assert store.run() == 0
    assert assert_imported(store).values.max() > 1 << 15


def test_tokens_outside_the_dictionary(store, refused):
    store.write()
    write_dictionary(store.dictionary, 10)
    refused(["does not hold tokens of a dictionary of 14 types", "give the dict.txt"])
    write_dictionary(store.dictionary, WORDS)
    values = store.values.copy()
    values[ROWS // 2 + 1] = WORDS + 4  # which no sample of a large store would find
    store.write(values=values)
    refused(["dictionary", "give the dict.txt"])


def test_values_that_were_not_written(store, refused):
    store.write()
    store.values[3000:] = 0
    store.write(values=store.values)
    refused(["holds nothing but zeros from entry 3,000 on", "--size 3000"])
    store.write(values=np.zeros(ROWS))
    refused(["holds nothing but zeros", "dump it again"])


@pytest.mark.parametrize("content", [b"\xff\xfe\x00binary", b"no counts here\n", b"w0 1\nw0 2\n", b"", None])
def test_not_a_dictionary(store, refused, content):
    store.write()
    store.dictionary.unlink()
    if content is None:
        store.dictionary.mkdir()
    else:
        store.dictionary.write_bytes(content)
    refused(["dict.txt", "give the dict.txt of the data"])


# --- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [3999, 3000, 40])
def test_dump_that_ended_early(store, refused, used):
    keys = states()
    keys[used:] = 0
    values = np.random.default_rng(1).integers(4, WORDS, ROWS)
    values[used:] = 0
    store.write(keys, values)
    refused([f"the last {ROWS - used:,} rows", "are zero", f"--size {used} "])
    refused([f"--size {used} "], "--size", used + 1)
    assert store.run("--size", used) == 0
    assert len(assert_imported(store, used)) == used


def test_dump_that_never_began(store, refused):
    store.write(np.zeros((ROWS, DIM)))
    refused(["holds nothing but zeros", "dump it again"])


def test_zero_rows_in_the_middle(store, refused):
    keys = states()
    keys[1234] = 0
    store.write(keys)
    refused(["row 1234 of", "the dump is damaged or was interrupted", "--size 1234"])
    keys = states(20_000)
    keys[5000:19_000] = 0  # a hole that the bisection meets first
    store.write(keys)
    refused(["row 5000 of", "damaged or was interrupted"])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinite_keys(store, refused, bad):
    keys = states()
    keys[2345, 7] = bad
    store.write(keys)
    sentence = refused(["row 2345 of", "dstore_keys.npy holds NaN or infinite numbers", "--size 2345"])
    assert "model" not in sentence


def test_bad_data_leaves_no_half_made_folder(store, refused, monkeypatch):
    monkeypatch.setattr(importer, "SHARD_ROWS", 1000)  # so that shards before the bad row are written
    keys = states()
    keys[3500] = 0
    store.write(keys)
    refused(["row 3500 of"])


def test_weights_of_the_wrong_size(store, refused):
    store.write()
    (store.folder / "dstore_weights.npy").write_bytes(b"1234")
    refused(["dstore_weights.npy", "no weights of 4 or 8 bytes", "move it away"])


def test_weights_that_are_none(store, refused):
    store.write()
    weights = np.ones((len(states()), 1), np.float32)
    weights[77] = -1
    weights.tofile(store.folder / "dstore_weights.npy")
    refused(["dstore_weights.npy", "not positive numbers"])


@pytest.mark.parametrize("dtype", ["int64", "int32", "float32"])
def test_weights_of_entries(store, dtype):
    """As merged datastores have them: raw, one number for each entry."""
    store.write()
    weights = np.random.default_rng(0).integers(1, 50, (len(states()), 1)).astype(dtype)
    if dtype == "float32":
        weights += 0.25
    weights.tofile(store.folder / "dstore_weights.npy")
    assert store.run() == 0
    np.testing.assert_array_equal(Datastore(store.output).weights, weights[:, 0].astype(np.float32))


# --- importing again ------------------------------------------------------------------------------------------------


def test_the_same_again_and_another(store, refused, capsys):
    store.write()
    assert store.run() == 0
    assert "4,000 entries imported" in capsys.readouterr().out
    assert store.run() == 0
    assert "4,000 entries there already" in capsys.readouterr().out
    before = Datastore(store.output).fingerprint
    store.write(states(seed=5))
    refused(["holds another dump", "raw_files_sha256"], new=False)
    assert Datastore(store.output).fingerprint == before


def test_killed_import_resumes(store, monkeypatch):
    monkeypatch.setattr(importer, "SHARD_ROWS", 1000)
    store.write()
    copy, copied = importer._copy_shard, []

    def killed_at_the_third(keys, values, weights, layout, shard, output, size):
        if shard.number == 2:
            output.append(store.keys[:10], store.values[:10])
            os._exit(9)
        copy(keys, values, weights, layout, shard, output, size)

    def watched(keys, values, weights, layout, shard, output, size):
        copied.append(shard.number)
        copy(keys, values, weights, layout, shard, output, size)

    child = os.fork()
    if child == 0:
        importer._copy_shard = killed_at_the_third
        store.run()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert list(store.output.glob("*.tmp"))
    monkeypatch.setattr(importer, "_copy_shard", watched)
    assert store.run() == 0
    assert copied == [2, 3]
    assert_imported(store)
    assert not list(store.output.glob("*.tmp")) and not list(store.output.glob("*.lock"))


def test_two_imports_at_once(store, monkeypatch):
    monkeypatch.setattr(importer, "SHARD_ROWS", 400)
    store.write()
    index, results = store.write_index(), []
    threads = [threading.Thread(target=lambda: results.append(store.run("--index", index))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [0, 0, 0]
    assert_imported(store)
    assert sorted(path.name for path in (store.output / "index").iterdir()) == ["imported"]
    assert not list(store.output.glob("*.lock")) and not list(store.output.glob("*.tmp"))
    assert main(["verify", str(store.output)]) == 0


# --- the index ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", ["IVF16,PQ8", "IVF16,Flat", "OPQ8,IVF16,PQ8", "HNSW16", "IVF16,PQ16x4fs"])
def test_index_is_adopted_and_restored(store, capsys, factory):
    store.write()
    index = store.write_index(factory) if factory != "HNSW16" else _write_graph(store)
    assert store.run("--index", index) == 0
    assert "4,000 entries imported; the index imported was adopted" in capsys.readouterr().out
    file = store.output / "index" / "imported" / "index.faiss"
    assert file.read_bytes() == index.read_bytes()
    assert store.run("--index", index) == 0
    assert "entries there already; the index imported is there already" in capsys.readouterr().out
    file.unlink()
    assert main(["verify", str(store.output)]) == 1
    assert store.run("--index", index) == 0
    assert "entries there already; the index imported was adopted" in capsys.readouterr().out
    with pytest.raises(KnnlmError, match="is for the metric l2; use --knn-metric l2"):
        build_index_if_missing(Datastore(store.output), "imported", "ip")
    assert main(["verify", str(store.output)]) == 0


def _write_graph(store: Store) -> Path:
    index = faiss.IndexHNSWFlat(DIM, 16)
    index.add(store.keys.astype(np.float32))
    faiss.write_index(index, str(store.folder / "knn.index"))
    return store.folder / "knn.index"


def test_index_of_other_keys(store, refused, capsys):
    store.write()
    ids = np.arange(ROWS)
    wrong = np.random.default_rng(3).choice(ROWS, ROWS * 3 // 10, replace=False)
    ids[wrong] = ids[np.roll(wrong, 1)]
    index = store.write_index(ids=ids)
    refused(
        ["knn.index is not an index of these keys", "leave --index out and run knnlm build"],
        "--index",
        index,
        new=False,
    )
    assert not list_indexes(Datastore(store.output))
    assert store.run() == 0
    assert "there already" in capsys.readouterr().out
    refused(["is not a FAISS index"], "--index", store.dictionary, new=False)
    refused(
        ["nothing.index cannot be read: it does not exist"], "--index", store.folder / "nothing.index", new=False
    )


def test_index_of_a_part(store, refused):
    store.write()
    whole, store.keys = store.keys, store.keys[:3000]
    index = store.write_index()
    store.keys = whole
    refused(["holds 3,000 keys, not 4,000; use --size 3000, or leave --index out"], "--index", index)
    assert store.run("--index", index, "--size", 3000) == 0
    assert_imported(store, 3000)


def test_killed_adoption(store, monkeypatch, capsys):
    store.write()
    first, second = store.write_index(), store.write_index("IVF8,Flat", name="other.index")
    assert store.run("--index", first) == 0
    rename = system.rename

    def fail(old, new):
        if Path(new).name == "imported":
            raise SystemExit
        rename(old, new)

    monkeypatch.setattr(system, "rename", fail)
    with pytest.raises(SystemExit):
        store.run("--index", second)
    monkeypatch.setattr(system, "rename", rename)
    assert store.run("--index", second) == 0
    assert sorted(path.name for path in (store.output / "index").iterdir()) == ["imported"]
    assert (store.output / "index" / "imported" / "index.faiss").read_bytes() == second.read_bytes()


@pytest.fixture
def on_disk(store) -> Path:
    """An index with its inverted lists in another file, as FAISS makes it."""
    store.write()
    keys = store.keys.astype(np.float32)
    index = faiss.index_factory(DIM, "IVF16,Flat")
    index.train(keys)
    lists = faiss.OnDiskInvertedLists(16, index.code_size, str(store.folder / "knn.ivfdata"))
    index.replace_invlists(lists)
    index.add(keys)
    faiss.write_index(index, str(store.folder / "knn.index"))
    return store.folder / "knn.index"


@pytest.mark.parametrize("moved", [False, True])
def test_lists_on_disk(store, on_disk, moved, capsys):
    if moved:  # then FAISS itself would not find the lists
        (store.folder / "elsewhere").mkdir()
        (store.folder / "knn.ivfdata").rename(store.folder / "elsewhere" / "knn.ivfdata")
        on_disk = on_disk.rename(store.folder / "elsewhere" / "knn.index")
    assert store.run("--index", on_disk) == 0
    (on_disk.parent / "knn.ivfdata").rename(store.folder / "gone")
    on_disk.unlink()
    datastore = Datastore(store.output)
    (info,) = list_indexes(datastore)
    assert info.lists_file == "knn.ivfdata" and info.lists_bytes == (store.folder / "gone").stat().st_size
    index = open_index(datastore, info)
    np.testing.assert_array_equal(index.search(store.keys[:50].astype(np.float32), 1)[1][:, 0], np.arange(50))
    assert main(["verify", str(store.output)]) == 0


def test_lists_on_disk_are_restored(store, on_disk):
    assert store.run("--index", on_disk) == 0
    copy = store.output / "index" / "imported" / "knn.ivfdata"
    copy.unlink()
    assert store.run("--index", on_disk) == 0
    assert copy.read_bytes() == (store.folder / "knn.ivfdata").read_bytes()


def test_lists_on_disk_are_missing(store, on_disk, refused):
    lists = store.folder / "knn.ivfdata"
    content = lists.read_bytes()
    lists.write_bytes(content[: len(content) // 2])
    refused(["knn.ivfdata does not hold the inverted lists"], "--index", on_disk)
    lists.unlink()
    refused(["knn.index has its inverted lists in knn.ivfdata, which is missing"], "--index", on_disk)


# --- the model ------------------------------------------------------------------------------------------------------


@pytest.fixture
def real(store, dump, corpus) -> Store:
    """The keys of a trained model."""
    datastore = Datastore(dump("train"))
    store.dictionary = corpus / "dict.txt"
    return store.write(np.concatenate(list(datastore.key_blocks())), datastore.values)


def test_checkpoint_makes_the_layer_certain(real, adaptive_model, plain_model, dump, corpus, evaluate):
    assert real.run("--path", adaptive_model) == 0
    ours, theirs = Datastore(dump("train")).manifest, assert_imported(real, len(real.keys)).manifest
    assert (theirs.layer, theirs.key, theirs.dim) == (ours.layer, ours.key, ours.dim) == (1, "ffn_input_ln", DIM)
    assert theirs.source["checkpoint_sha256"] == ours.source["checkpoint_sha256"]
    with pytest.raises(KnnlmError, match="checkpoint"):
        evaluate(corpus, plain_model, "--knn-datastore", real.output)


def test_checkpoint_without_path(real):
    assert real.run() == 0
    manifest = Datastore(real.output).manifest
    assert manifest.layer == -1 and "checkpoint_sha256" not in manifest.source


def test_checkpoint_that_does_not_fit(real, refused, adaptive_model):
    refused(["there is no checkpoint"], "--path", real.folder / "nothing.pt")
    refused(["cannot be loaded", "give a file that fairseq"], "--path", real.keys_path)
    refused(["does not exist"], "--path", adaptive_model, "--layer", 7)
    real.write(np.tile(real.keys, 2), real.values)
    refused(["do not fit together with the 64 dimensions of the checkpoint"], "--path", adaptive_model)
    dictionary = real.dictionary
    real.dictionary = real.folder / "words.txt"
    real.dictionary.write_text(dictionary.read_text())
    refused(["--path needs a dictionary that is called dict.txt"], "--path", adaptive_model)
