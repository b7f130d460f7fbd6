"""Transformer-XL and SPALM with the stock commands: neighbours, training, scoring, with and without a datastore."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import REPO, eval_lm_here, fails_with, run
from reference import has_tie, knn_probability, load, mixture

from fairseq_knnlm.cli import main
from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.spalm.neighbors import NeighborTable
from fairseq_knnlm.spalm.transformer_xl import Lanes

TRAINING = [
    "--user-dir", REPO / "fairseq_knnlm", "--task", "spalm", "--cpu", "--tokens-per-sample", "32", "--batch-size", "8",
    "--memory-size", "32", "--criterion", "adaptive_loss", "--adaptive-cutoff", "50,120", "--ddp-backend",
    "legacy_ddp", "--optimizer", "adam", "--lr", "0.005", "--no-progress-bar", "--no-epoch-checkpoints",
    "--num-workers", "0",
]  # fmt: skip
XL = ["--arch", "transformer_xl_lm", "--layers", "2", "--dim", "64", "--heads", "2", "--ffn-dim", "128"]
SCORING = ["--task", "spalm", "--tokens-per-sample", "32", "--context-window", "0"]


def train_here(corpus, folder, *flags):
    """fairseq-train in this process, which saves the seconds that importing fairseq takes."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.logging import metrics
    from fairseq_cli import train

    metrics.reset()
    arguments = list(map(str, [corpus, "--save-dir", folder, *TRAINING, *flags]))
    args = options.parse_args_and_arch(options.get_training_parser(), arguments)
    train.main(convert_namespace_to_omegaconf(args))
    return folder / "checkpoint_last.pt"


def knnlm(*arguments) -> int:
    """The command in this process; its exit code."""
    return main(list(map(str, arguments)))


def make_table(datastore, queries, folder, *flags) -> int:
    return knnlm("neighbors", "--datastore", datastore, "--queries", queries, "-o", folder, *flags)


@pytest.fixture(scope="module")
def neighbors(dump, tmp_path_factory):
    folder = tmp_path_factory.mktemp("neighbors")
    for split in ("train", "valid"):
        assert make_table(dump("train"), dump(split), folder / split, "--k", "4") == 0
    return folder


@pytest.fixture(scope="module")
def spalm(corpus, neighbors, tmp_path_factory):
    flags = ["--arch", "spalm_lm_tiny", "--neighbors", neighbors, "--max-epoch", "3"]
    return train_here(corpus, tmp_path_factory.mktemp("spalm"), *flags)


@pytest.fixture(scope="module")
def xl(corpus, tmp_path_factory):
    return train_here(corpus, tmp_path_factory.mktemp("xl"), *XL, "--max-epoch", "2")


@pytest.fixture(scope="module")
def xl_store(corpus, dump, xl):
    return {split: dump(split, *SCORING, "--knn-key-dtype", "float32", model=xl) for split in ("train", "valid")}


@pytest.fixture(scope="module")
def tokens(corpus):
    """Number of tokens of each split."""
    texts = {split: corpus.parent / f"{split}.txt" for split in ("train", "valid")}
    return {split: sum(len(line.split()) + 1 for line in text.open()) for split, text in texts.items()}


@pytest.fixture
def lanes(monkeypatch):
    """What the model asked its memory for: (text, step, how many states it got)."""
    asked, get = [], Lanes.get

    def record(self, text, step, layers, like):
        states = get(self, text, step, layers, like)
        asked.append((text, step, states.size(2)))
        return states

    monkeypatch.setattr(Lanes, "get", record)
    return asked


# --- neighbours -----------------------------------------------------------------------------------------------------


def test_table_against_brute_force(dump, neighbors, tokens):
    store = Datastore(dump("train"))
    keys, values = load(store)
    keys = keys.astype(np.float64)
    for split, window in (("train", 64), ("valid", -1)):
        table, queries = NeighborTable(neighbors / split), load(Datastore(dump(split)))
        assert len(table) == tokens[split]
        for row in range(0, len(table), 97):
            distances = ((keys - queries[0][row].astype(np.float64)) ** 2).sum(axis=1)
            distances[np.abs(np.arange(len(keys)) - row) <= window] = np.inf  # --tokens-per-sample was 64
            np.testing.assert_allclose(table.distances(row, row + 1)[0], np.sort(distances)[:4], rtol=1e-3, atol=1e-3)
            ids = table.ids(row, row + 1)[0]
            np.testing.assert_array_equal(table.tokens(row, row + 1)[0], values[ids])
        np.testing.assert_array_equal(table.own_tokens(0, len(table)), queries[1])
    first = NeighborTable(neighbors / "valid")
    share = (first.tokens(0, len(first))[:, 0].numpy() == first.own_tokens(0, len(first))).mean()
    assert first.shares_of_target()[0] == pytest.approx(share)


def test_no_token_finds_itself_in_a_subsample(dump, tmp_path):
    assert knnlm("subsample", dump("train"), "--fraction", "0.5", "-o", tmp_path / "half") == 0
    assert make_table(tmp_path / "half", dump("train"), tmp_path / "table", "--window", "10") == 0
    table, places = NeighborTable(tmp_path / "table"), np.load(tmp_path / "half/positions.npy")
    distance = np.abs(places[table.ids(0, len(table))] - np.arange(len(table))[:, None])
    assert distance.min() == 11


def test_parts_and_resuming(dump, neighbors, capsys, tmp_path):
    """Parts give the same table; what was interrupted is continued, and nothing is made twice."""
    outputs = []
    for part in (1, 0):
        make_table(dump("train"), dump("valid"), tmp_path / "table", "--num-shards", 2, "--shard-id", part)
        outputs.append(capsys.readouterr().out)
    whole, parts = NeighborTable(neighbors / "valid"), NeighborTable(tmp_path / "table")
    np.testing.assert_array_equal(parts.ids(0, len(parts)), whole.ids(0, len(whole)))
    assert "the first neighbour" not in outputs[0] and "the first neighbour" in outputs[1]
    files = sorted((tmp_path / "table").glob("ids-*.npy"))
    files[3].unlink()
    with pytest.raises(KnnlmError, match=r"incomplete \(1 of"):
        NeighborTable(tmp_path / "table")
    before = {file: file.stat().st_mtime_ns for file in files if file.exists()}
    make_table(dump("train"), dump("valid"), tmp_path / "table")
    output = capsys.readouterr().out
    assert f"{len(np.load(files[3])):,} tokens in" in output and "processor seconds for a million" in output
    assert before == {file: file.stat().st_mtime_ns for file in before}
    np.testing.assert_array_equal(NeighborTable(tmp_path / "table").ids(0, len(whole)), whole.ids(0, len(whole)))


def test_bad_tables(corpus, dump, neighbors, xl_store, capsys, tmp_path):
    def sentence(queries, *flags, folder=tmp_path / "table") -> str:
        assert make_table(dump("train"), queries, folder, *flags) == 1
        return capsys.readouterr().err

    assert "another checkpoint" in sentence(xl_store["valid"])
    assert "--k must be" in sentence(dump("valid"), "--k", "0")
    assert "--nprobe must be" in sentence(dump("valid"), "--nprobe", "0")
    assert "leave it out" in sentence(dump("valid"), "--window", "3")
    assert not (tmp_path / "table").exists()
    assert "holds other neighbours" in sentence(dump("valid"), "--k", "3", folder=neighbors / "valid")


# --- training -------------------------------------------------------------------------------------------------------


def test_memory_over_epochs_and_splits(corpus, tokens, lanes, tmp_path):
    """Segments come in order; memory begins empty with each epoch and each split; resuming starts where it ended."""
    steps = math.ceil(math.ceil(tokens["train"] / 8) / 32)
    stop = steps + 5  # in the second epoch
    train_here(corpus, tmp_path, *XL, "--max-update", stop, "--max-epoch", "2")
    first = [(step, size) for text, step, size in lanes if text == "train"]
    assert [step for step, _ in first] == [*range(steps), *range(5)]
    assert all(size == (32 if step else 0) for step, size in first)
    valid = [(step, size) for text, step, size in lanes if text == "valid"]
    assert all((size == 0) == (step == 0) for step, size in valid) and len(valid) > 1
    lanes.clear()
    train_here(corpus, tmp_path, *XL, "--max-epoch", "2")
    resumed = [(step, size) for text, step, size in lanes if text == "train"]
    assert [step for step, _ in resumed] == list(range(5, steps))  # no segment twice, none left out
    assert [size for _, size in resumed[:3]] == [0, 32, 32]  # the memory begins empty after a restart


def test_train_and_score(evaluate, corpus, spalm, neighbors, tokens):
    flags = [*SCORING, "--neighbors", neighbors]
    result = evaluate(corpus, spalm, *flags)
    assert len(result.scores) == tokens["valid"]
    assert result.loss < 7.0  # 208 types are 7.7 bits
    other = evaluate(corpus, spalm, *flags, "--model-overrides", "{'memory_size': 0}")
    assert other.loss != result.loss
    fewer = evaluate(corpus, spalm, *flags, "--model-overrides", "{'neighbors_used': 1}")
    assert fewer.loss != result.loss


def test_bad_neighbours(corpus, neighbors, tmp_path):
    """Each is refused before training starts."""
    spalm = ["--arch", "spalm_lm_tiny", "--max-update", "1"]
    count = iter(range(100))

    def sentence(*flags) -> str:
        with pytest.raises(KnnlmError) as error:
            train_here(corpus, tmp_path / "model", *spalm, *flags)
        return str(error.value)

    def tables(**splits):
        folder = tmp_path / f"tables{next(count)}"
        folder.mkdir()
        for split, table in splits.items():
            (folder / split).symlink_to(table)
        return ["--neighbors", folder]

    def changed(split, change, kind="facts"):
        """A table of which one thing is different."""
        folder = tmp_path / f"changed{next(count)}"
        shutil.copytree(neighbors / split, folder)
        if kind == "facts":
            facts = json.loads((folder / "neighbors.json").read_text())
            change(facts)
            (folder / "neighbors.json").write_text(json.dumps(facts))
        else:
            np.save(folder / "tokens-00000.npy", change(np.load(folder / "tokens-00000.npy")))
        return folder

    train, valid = neighbors / "train", neighbors / "valid"
    assert "give --neighbors" in sentence()
    assert "lower --neighbors-used" in sentence("--neighbors", neighbors, "--neighbors-used", "5")
    assert "leave out --neighbors" in sentence("--neighbors", neighbors, "--neighbors-used", "0")
    assert "another text" in sentence(*tables(train=valid, valid=valid))  # of another split, of another length
    assert "valid is not a neighbor-table" in sentence(*tables(train=train))
    other = changed("valid", lambda facts: facts["queries"].update(dictionary_sha256="other"))
    assert "another dictionary" in sentence(*tables(train=train, valid=other))
    other = changed("valid", lambda facts: facts["queries"].update(data_sha256="other"))
    assert "another text" in sentence(*tables(train=train, valid=other))
    shifted = changed("train", lambda rows: np.roll(rows, 1, axis=0), "tokens")
    assert "has slipped" in sentence(*tables(train=shifted, valid=valid))
    shorter = changed("train", lambda rows: rows[:-1], "tokens")
    assert "has the shape" in sentence(*tables(train=shorter, valid=valid))
    assert not list((tmp_path / "model").glob("*.pt"))


def test_a_user_sees_one_sentence(corpus, neighbors, spalm, tmp_path):
    """fairseq-train and fairseq-interactive as processes: the sentence, no traceback."""
    training = ["--save-dir", tmp_path, *TRAINING, "--arch", "spalm_lm_tiny"]
    fails_with(run("fairseq-train", corpus, *training, check=False), "run knnlm neighbors, then give --neighbors")
    flags = ["--user-dir", REPO / "fairseq_knnlm", "--cpu", "--task", "spalm", "--path", spalm]
    result = run("fairseq-interactive", corpus, *flags, "--neighbors", neighbors, input="w1 w2\n", check=False)
    fails_with(result, "SPALM cannot generate", "fairseq-interactive --task knn_language_modeling --knn-datastore")


def test_another_model_under_the_task(evaluate, corpus, adaptive_model):
    with pytest.raises(KnnlmError, match="use --task knn_language_modeling"):
        evaluate(corpus, adaptive_model, *SCORING)


# --- with a datastore -----------------------------------------------------------------------------------------------


def test_keys_are_in_corpus_order(corpus, xl, xl_store, dump, tokens, tmp_path):
    """A dump in parts is the dump in one go: each part first reads what its states depend on."""
    whole = Datastore(xl_store["train"])
    np.testing.assert_array_equal(whole.values, Datastore(dump("train")).values)  # as the Transformer's dump has them
    assert len(whole) == tokens["train"]
    for part in ("1", "0"):
        flags = [*SCORING, "--knn-key-dtype", "float32", "--num-shards", "2", "--shard-id", part]
        eval_lm_here(corpus, xl, "--gen-subset", "train", "--knn-dump", tmp_path / "parts", *flags)
    parts = Datastore(tmp_path / "parts")
    np.testing.assert_array_equal(parts.values, whole.values)
    np.testing.assert_allclose(load(parts)[0], load(whole)[0], atol=1e-4)


@pytest.mark.parametrize("model", ["xl", "spalm"])
def test_mixture_equals_brute_force(evaluate, corpus, dump, neighbors, model, request):
    flags = [*SCORING, *(["--neighbors", neighbors] if model == "spalm" else [])]
    model = request.getfixturevalue(model)
    train, valid = (dump(split, *flags, "--knn-key-dtype", "float32", model=model) for split in ("train", "valid"))
    lm = evaluate(corpus, model, *flags)
    knn = ["--knn-datastore", train, "--knn-index", "flat", "--knn-k", "16", "--knn-lambda", "0.3"]
    ours = evaluate(corpus, model, *flags, *knn, "--knn-temperature", "5")
    (keys, values), (queries, targets) = load(Datastore(train)), load(Datastore(valid))
    expected = mixture(lm.scores, [knn_probability(queries, targets, keys, values, 16, 5.0)], [0.3])
    clear = ~has_tie(queries, keys, 16)
    assert clear.mean() > 0.9
    np.testing.assert_allclose(ours.scores[clear], expected[clear], atol=1e-4)


def test_shards_equal_one_run(evaluate, corpus, xl, xl_store, capsys, tmp_path):
    knn = ["--knn-datastore", xl_store["train"], "--knn-k", "16", "--knn-cache-size", "50", "--knn-cache-lambda", "0.1"]
    whole = evaluate(corpus, xl, *SCORING, *knn).scores
    parts = [
        evaluate(corpus, xl, *SCORING, *knn, "--num-shards", "3", "--shard-id", part, "--knn-save", tmp_path / part)
        for part in "012"
    ]
    np.testing.assert_allclose(np.concatenate([part.scores for part in parts]), whole, atol=1e-4)
    capsys.readouterr()
    assert knnlm("tune", *(tmp_path / part for part in "012"), "--json") == 0
    scored = json.loads(capsys.readouterr().out)["results"]["valid, as scored"]
    assert scored["tokens"] == len(whole) and scored["mixture"] == pytest.approx(np.exp(-whole.mean()), rel=1e-3)


def test_a_datastore_of_another_memory(evaluate, corpus, xl, xl_store):
    """The memory may differ between dump and scoring, as a context window may; a window is refused."""
    more = ["--model-overrides", "{'memory_size': 64}"]
    assert evaluate(corpus, xl, *SCORING, *more, "--knn-datastore", xl_store["train"], "--knn-k", "8").loss > 0
    with pytest.raises(KnnlmError, match="instead of --context-window"):
        evaluate(corpus, xl, "--task", "spalm", "--tokens-per-sample", "64", "--context-window", "32")


# --- analysis -------------------------------------------------------------------------------------------------------


def test_gates_and_k(evaluate, corpus, spalm, neighbors, tmp_path):
    common = ["--path", spalm, "--data", corpus, "--neighbors", neighbors, "--tokens-per-sample", "32"]
    common += ["--tokens", 500, "-o", tmp_path]
    assert knnlm("spalm", "gates", *common, "--from", 70, "--show", 20) == 0
    gates = json.loads((tmp_path / "gates.json").read_text())
    assert gates["tokens"] == 500 and sum(gates["counts"]) == 500 * 64 and len(gates["sequence"]) == 20
    assert 0 < gates["mean"] < 1
    for name in ("gates-histogram.svg", "gates-map.svg"):
        assert "<svg" in (tmp_path / name).read_text()
    assert knnlm("spalm", "k", *common, "--values", "1,4") == 0
    rows = {row["k"]: row["perplexity"] for row in json.loads((tmp_path / "k.json").read_text())["rows"]}
    scores = evaluate(corpus, spalm, *SCORING, "--neighbors", neighbors).scores[:500]
    assert rows[4] == pytest.approx(np.exp(-scores.mean()), rel=1e-4) and rows[1] != rows[4]
    assert knnlm("spalm", "k", *common, "--values", 8) == 1  # the table has 4


def test_a_range_is_read_with_its_memory(corpus, spalm, neighbors):
    from fairseq_knnlm.spalm.analysis import SplitReader

    reader = SplitReader(str(spalm), str(corpus), str(neighbors), "valid", 32, None)
    whole = torch.cat([segment.states for segment in reader.read(0, 700)], dim=1)
    part = torch.cat([segment.states for segment in reader.read(333, 700)], dim=1)
    torch.testing.assert_close(part, whole[:, 333:], atol=1e-4, rtol=1e-4)


def test_neighbours_of_a_text(corpus, dump, neighbors, capsys, tmp_path):
    flags = ["spalm", "neighbors", neighbors / "valid", "--data", corpus, "-o", tmp_path]
    assert knnlm(*flags, "--tokens", 5, "--from", 3) == 0
    shown = capsys.readouterr().out
    text = " </s> ".join((corpus.parent / "valid.txt").read_text().splitlines()).split()
    assert re.findall(r"^ *(\d+)  (\S+)", shown, re.MULTILINE) == [(str(i), text[i]) for i in range(3, 8)]
    rows = json.loads((tmp_path / "neighbors.json").read_text())["rows"]
    assert len(rows) == 5 and all(len(row["neighbors"]) == 4 for row in rows)
    assert knnlm(*flags, "--tokens", 1, "--datastore", dump("train")) == 0
    values = Datastore(dump("train")).values
    near = json.loads((tmp_path / "neighbors.json").read_text())["rows"][0]["neighbors"][0]
    assert len(near["context"].split()) == min(8, near["entry"])
    assert values[near["entry"]] == NeighborTable(neighbors / "valid").tokens(0, 1)[0, 0]
    assert knnlm(*flags, "--datastore", dump("valid")) == 1
    assert "another datastore" in capsys.readouterr().err


def test_gains(evaluate, corpus, xl, spalm, neighbors, capsys, tmp_path):
    scores = [
        evaluate(corpus, spalm, *SCORING, "--neighbors", neighbors, "--knn-save", tmp_path / "spalm").scores,
        evaluate(corpus, xl, *SCORING, "--knn-save", tmp_path / "xl").scores,
    ]
    flags = ["--data", corpus, "--margin", "0.02", "-o", tmp_path]
    assert knnlm("spalm", "gains", tmp_path / "spalm", tmp_path / "xl", *flags) == 0
    gains = json.loads((tmp_path / "gains.json").read_text())
    difference = np.exp(scores[0]) - np.exp(scores[1])
    assert gains["better"]["count"] == pytest.approx((difference > 0.02).sum(), abs=1) and gains["better"]["count"]
    assert gains["worse"]["count"] == pytest.approx((difference < -0.02).sum(), abs=1)
    assert (tmp_path / "gains.svg").exists()
    best = gains["better"]["rows"][0]
    assert best["position"] == difference.argmax()
    assert best["spalm"] - best["xl"] == pytest.approx(difference.max(), abs=1e-4)
