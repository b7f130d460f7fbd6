"""What a command does when no flag says how: defaults, presets, kept values, hints and warnings."""

import json
import logging
import math
import re
import shutil

import numpy as np
import pytest
from commands import error_of, eval_lm_here, interactive_here, knnlm, sentence_of

from fairseq_knnlm import KNNLM, Datastore, build_index
from fairseq_knnlm.datastore.tuned import TUNED, read_tuned
from fairseq_knnlm.index import list_indexes
from fairseq_knnlm.saved_runs.format import SavePart


@pytest.fixture
def store(dump, tmp_path):
    """A datastore of train of one's own, in which values can be kept."""
    return shutil.copytree(dump("train"), tmp_path / "store")


@pytest.fixture
def score(evaluate, corpus, adaptive_model, store):
    """score(*flags): the valid split with the datastore."""
    return lambda *flags: evaluate(corpus, adaptive_model, "--knn-datastore", store, *flags)


def lines_with(log: str, *parts: str) -> list[str]:
    return [line for line in log.splitlines() if all(part in line for part in parts)]


# --- k, presets, limits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", ["flat", "IVF16,SQfp16"])
def test_every_entry_takes_part_by_default(score, index):
    ours, all_of_them = (score("--knn-index", index, "--knn-temperature", 5, *k) for k in ((), ("--knn-k", "all")))
    np.testing.assert_array_equal(ours.scores, all_of_them.scores)
    assert score("--knn-index", index, "--knn-temperature", 5, "--knn-k", 8).loss != ours.loss


def test_where_a_number_is_needed_it_is_1024(score):
    published = ("--knn-temperature", 5, "--knn-nprobe", 4)
    for flags, why in (
        (("--knn-index", "IVF16,PQ8", "--knn-score", "index"), "k is 1024: --knn-score index needs a number"),
        (("--knn-index", "HNSW8"), "k is 1024: the index HNSW8 (HNSW8) has no inverted lists"),
    ):
        ours = score(*flags, *published)
        assert len(lines_with(ours.log, why)) == 1
        np.testing.assert_array_equal(ours.scores, score(*flags, *published, "--knn-k", 1024).scores)
        assert "--knn-k all" in sentence_of(score, *flags, "--knn-k", "all")


def test_the_paper_in_one_flag(score, corpus, adaptive_model, store):
    said = ("--knn-index", "paper", "--knn-k", "1024", "--knn-lambda", "0.25", "--knn-temperature", "1")
    paper = score("--knn-preset", "paper")
    np.testing.assert_array_equal(paper.scores, score(*said).scores)
    assert not lines_with(paper.log, "distances between")  # no flag is missing, so there is nothing to say
    other = ("--knn-temperature", "5", "--knn-k", "16")
    np.testing.assert_array_equal(score("--knn-preset", "paper", *other).scores, score(*said, *other).scores)
    assert "--knn-preset takes fast or paper, not 'papers'" in sentence_of(score, "--knn-preset", "papers")
    assert "does nothing without" in sentence_of(eval_lm_here, corpus, adaptive_model, "--knn-preset", "paper")


def test_fast_in_one_flag(score):
    said = ("--knn-k", "all", "--knn-nprobe", "16", "--knn-far", "64")
    index = ("--knn-index", "IVF128,SQfp16", "--knn-temperature", "5")
    np.testing.assert_array_equal(score("--knn-preset", "fast", *index).scores, score(*said, *index).scores)
    one = score("--knn-preset", "fast", "--knn-nprobe", "1", *index).scores
    np.testing.assert_array_equal(one, score(*said[:2], "--knn-nprobe", "1", *said[4:], *index).scores)


def test_the_far_field_is_there_unless_lists_are_counted(score):
    index = ("--knn-index", "IVF128,SQfp16", "--knn-temperature", "5")
    usual = score(*index)
    assert "k all, 32 lists and 64 in the far field)" in usual.log
    np.testing.assert_array_equal(usual.scores, score("--knn-nprobe", "32", "--knn-far", "64", *index).scores)
    counted = score("--knn-nprobe", "32", *index)
    assert "k all, 32 lists)" in counted.log and not np.array_equal(usual.scores, counted.scores)
    np.testing.assert_array_equal(counted.scores, score("--knn-far", "0", *index).scores)


def test_a_dump_with_the_preset_builds_its_index(corpus, adaptive_model, tmp_path):
    dump = ("--gen-subset", "valid", "--knn-dump", tmp_path / "store")
    assert "not 'papers'" in sentence_of(eval_lm_here, corpus, adaptive_model, *dump, "--knn-preset", "papers")
    assert not (tmp_path / "store").exists()
    eval_lm_here(corpus, adaptive_model, *dump, "--knn-preset", "paper")
    assert [info.spec for info in list_indexes(Datastore(tmp_path / "store"))] == ["paper"]


def test_more_neighbours_and_lists_than_there_are(score, store):
    flags = ("--knn-index", "IVF16,SQfp16", "--knn-temperature", 5)
    clamped = score(*flags, "--knn-k", 99999999)
    assert len(lines_with(clamped.log, f"--knn-k 99999999 is above the {len(Datastore(store)):,} entries")) == 1
    np.testing.assert_array_equal(clamped.scores, score(*flags).scores)
    every = score(*flags, "--knn-nprobe", 5000)
    assert len(lines_with(every.log, "--knn-nprobe 5000 is above the 16 lists")) == 1
    np.testing.assert_array_equal(every.scores, score(*flags, "--knn-nprobe", 16).scores)


# --- temperature ----------------------------------------------------------------------------------------------------


def test_the_temperature_is_at_the_scale_of_the_distances(score, store):
    auto = next(info for info in list_indexes(Datastore(store)) if info.name == "auto")
    ours = score()
    (line,) = lines_with(ours.log, "from the distances between neighbours in this datastore; tune it with")
    assert f"temperature {auto.temperature:g}," in line and auto.temperature != 1
    said = score("--knn-temperature", auto.temperature, "--knn-lambda", "0.25")
    np.testing.assert_array_equal(ours.scores, said.scores)
    assert ours.loss < score("--knn-temperature", 1).loss  # what nobody chose would be worse
    # An index of an older release does not tell.
    record = store / "index/auto/index.json"
    content = {name: v for name, v in json.loads(record.read_text()).items() if name not in ("temperature", "checksum")}
    record.write_text(json.dumps(content))
    np.testing.assert_array_equal(score().scores, ours.scores)
    np.testing.assert_array_equal(score("--knn-mask", "exact").scores, ours.scores)


def test_lambda_zero_is_the_lm_to_the_digit(score, evaluate, corpus, adaptive_model):
    stock = evaluate(corpus, adaptive_model, stock=True)
    ours = score("--knn-lambda", "0")
    assert ours.loss == pytest.approx(stock.loss, abs=1e-6)
    assert not lines_with(ours.log, "hint:")


# --- kept values ----------------------------------------------------------------------------------------------------


def keep(capsys, *arguments) -> tuple[list[str], float]:
    """knnlm tune --keep; the flags that it prints, and the perplexity that it promises."""
    assert knnlm("tune", *arguments, "--keep") == 0
    output = capsys.readouterr().out
    assert "Kept in" in output
    flags = next(line for line in output.splitlines() if line.startswith("--knn-")).split()
    return flags, float(re.search(r"a perplexity of ([\d.]+\d)", output)[1])


def test_kept_values_are_used_by_every_command(
    score, corpus, adaptive_model, store, tmp_path, capsys, caplog, monkeypatch
):
    score("--knn-save", tmp_path / "save")
    flags, expected = keep(capsys, tmp_path / "save")
    ours, said = score(), score(*flags)
    np.testing.assert_array_equal(ours.scores, said.scores)
    assert 2**ours.loss == pytest.approx(expected, rel=1e-4)
    (line,) = lines_with(ours.log, "as tuned on valid (20", "knnlm tune --keep; give --knn-lambda or --knn-temperature")
    assert f"lambda {flags[3]} and temperature {flags[5]} as" in line
    (kept,) = read_tuned(store, Datastore(store).fingerprint)
    assert (kept.split, kept.tokens, kept.k, kept.settings) == ("valid", len(ours.scores), None, 9)
    assert kept.perplexity == pytest.approx(expected, abs=1e-4)

    lm = KNNLM.from_pretrained(adaptive_model.parent, adaptive_model.name, corpus, datastore=store)
    explicit = {"lambda_": float(flags[3]), "temperature": float(flags[5]), "k": "all"}
    again = KNNLM.from_pretrained(adaptive_model.parent, adaptive_model.name, corpus, datastore=store, **explicit)
    assert lm.score("w1 w2 w3").log_probs == again.score("w1 w2 w3").log_probs

    (tmp_path / "text.txt").write_text("w1 w2 w3\n")
    model = ["--path", adaptive_model, "--data", corpus]
    command = ["score", *model, "--knn-datastore", store, tmp_path / "text.txt"]
    assert knnlm(*command) == 0
    printed = capsys.readouterr()
    assert f"lambda {flags[3]} and temperature {flags[5]} as tuned" in printed.err
    assert knnlm(*command, *flags) == 0
    assert capsys.readouterr().out == printed.out
    page = tmp_path / "page.html"
    assert knnlm("inspect", *model, "--datastore", store, "--text", "w1 w2 w3", "-o", page) == 0
    assert "as tuned on valid" in capsys.readouterr().err
    assert f'"lambda": {flags[3]}' in page.read_text().replace('"lambda":', '"lambda": ').replace("  ", " ")

    generation = ["--beam", "1", "--max-len-b", "8", "--knn-datastore", store]
    results = [interactive_here(corpus, adaptive_model, ["w1 w2"], *generation, *extra) for extra in ((), flags)]
    scores = [re.findall(r"^[HP]-.*$", result.stdout, re.MULTILINE) for result in results]
    assert scores[0] == scores[1] and "as tuned on valid" in results[0].log

    assert knnlm("sweep", tmp_path / "save", "--over", "lambda", "--values", flags[3]) == 0
    swept = capsys.readouterr()
    assert "as tuned on valid" in swept.err and f"--knn-temperature {flags[5]} " in swept.err
    assert f"{expected:.2f}" in swept.out.splitlines()[-1]


def test_kept_values_that_do_not_fit_are_not_used(score, tmp_path, capsys):
    score("--knn-save", tmp_path / "save")
    keep(capsys, tmp_path / "save")
    for flags, why in (
        (("--knn-k", "16"), "they are for --knn-k all"),
        (("--knn-metric", "ip"), "they are for --knn-metric l2"),
        (("--knn-cache-size", "10"), "they are for a mixture without a cache"),
    ):
        ours = score(*flags)
        assert len(lines_with(ours.log, f"not used: {why}")) == 1
        assert "(lambda 0.25)" in ours.log
    assert not lines_with(score("--knn-preset", "paper").log, "tune --keep")
    for flags in (("--knn-lambda", "0.5"), ("--knn-temperature", "3")):  # a flag that is given wins
        assert "as tuned on valid" in score(*flags).log


def test_k_and_cache_are_kept_too(score, tmp_path, capsys):
    score("--knn-k", "64", "--knn-cache-size", "50", "--knn-save", tmp_path / "save")
    flags, expected = keep(capsys, tmp_path / "save")
    size = ("--knn-cache-size", flags[flags.index("--knn-cache-size") + 1])
    ours, said = score(*size), score(*flags)
    np.testing.assert_array_equal(ours.scores, said.scores)
    assert 2**ours.loss == pytest.approx(expected, rel=1e-4)
    assert lines_with(ours.log, f"k {flags[1]} and lambda", "as tuned on valid")
    assert lines_with(ours.log, "cache lambda", "and cache theta", "as tuned on valid")
    alone, alone_expected = keep(capsys, tmp_path / "save", "--without", "cache")
    assert 2 ** score().loss == pytest.approx(alone_expected, rel=1e-4)
    np.testing.assert_array_equal(score(*size).scores, ours.scores)  # of both mixtures something is kept
    assert alone[1::2] != flags[1:6:2]


def test_each_datastore_has_its_own_values(evaluate, corpus, adaptive_model, store, dump, tmp_path, capsys):
    other = shutil.copytree(dump("test", "--knn-key", "ffn_input"), tmp_path / "other")
    both = ("--knn-datastore", f"{store},{other}")
    saved = evaluate(corpus, adaptive_model, *both, "--knn-save", tmp_path / "save")
    assert len(lines_with(saved.log, "from the distances between neighbours in")) == 2
    flags, expected = keep(capsys, tmp_path / "save")
    assert flags[3].count(",") == flags[5].count(",") == 1
    ours = evaluate(corpus, adaptive_model, *both)
    np.testing.assert_array_equal(ours.scores, evaluate(corpus, adaptive_model, *both, *flags).scores)
    assert 2**ours.loss == pytest.approx(expected, rel=1e-4)
    turned = evaluate(corpus, adaptive_model, "--knn-datastore", f"{other},{store}")
    np.testing.assert_allclose(turned.scores, ours.scores, atol=1e-5)
    alone = evaluate(corpus, adaptive_model, "--knn-datastore", store)
    assert lines_with(alone.log, "they are for a mixture with other datastores")


def test_keeping_in_a_datastore_that_moved(score, store, tmp_path, capsys):
    score("--knn-save", tmp_path / "save")
    moved = store.rename(tmp_path / "moved")
    assert "is not a datastore" in error_of(capsys, "tune", tmp_path / "save", "--keep")
    keep(capsys, tmp_path / "save", "--datastore", moved)
    assert (moved / TUNED).exists()
    shutil.rmtree(moved / "index")
    assert knnlm("sweep", tmp_path / "save", "--over", "lambda") == 0  # a save is looked at without its datastore
    assert SavePart.open(tmp_path / "save").run.memories[0].folder == str(store)


def test_a_damaged_record_of_kept_values(score, store):
    (store / TUNED).write_text('{"format": ')
    assert "tuned.json is damaged" in sentence_of(score)
    assert score("--knn-lambda", "0.2", "--knn-temperature", "5").loss > 0  # which needs none


# --- hints and warnings ---------------------------------------------------------------------------------------------


def test_a_mixture_that_is_worse_than_the_lm(score, store, corpus, adaptive_model, tmp_path, capsys):
    worse = ("--knn-lambda", "0.9", "--knn-temperature", "0.01")
    (hint,) = lines_with(score(*worse).log, "hint:")
    assert "score valid with --knn-save SAVE, then run knnlm tune SAVE --keep" in hint
    (hint,) = lines_with(score(*worse, "--knn-save", tmp_path / "save").log, "hint:")
    assert f"help, run knnlm tune {tmp_path / 'save'} --keep" in hint
    assert not lines_with(score("--knn-lambda", "0.1", "--knn-temperature", "20").log, "hint:")
    (tmp_path / "text.txt").write_text("w1 w1 w1 w1 w1\n")
    command = ["score", "--path", adaptive_model, "--data", corpus, "--knn-datastore", store, tmp_path / "text.txt"]
    assert knnlm(*command, *worse, "--json") == 0
    assert "knnlm tune SAVE --keep" in capsys.readouterr().err


def test_longer_contexts_than_in_training(evaluate, corpus, adaptive_model, tmp_path):
    """The model was trained with samples of 64 tokens."""
    longer = ("--tokens-per-sample", "100", "--context-window", "60")
    (warning,) = lines_with(evaluate(corpus, adaptive_model, *longer).log, "warning:")
    assert "100 is more than the 64 tokens" in warning and "--tokens-per-sample 64 --context-window 32" in warning
    assert "64 tokens" in evaluate(corpus, adaptive_model, *longer, "--knn-dump", tmp_path / "store").log
    assert not lines_with(evaluate(corpus, adaptive_model).log, "warning:")


def test_another_context_than_the_datastore_has(score, evaluate, corpus, adaptive_model, store):
    (warning,) = lines_with(score("--context-window", "16").log, "warning:")
    assert f"{store} was dumped with --tokens-per-sample 64 --context-window 32, this run has" in warning
    assert "--tokens-per-sample 64 --context-window 16;" in warning
    assert not lines_with(score().log, "warning:")


# --- dry run --------------------------------------------------------------------------------------------------------


def test_a_dry_run_writes_nothing(corpus, adaptive_model, tokens, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder = tmp_path / "store"
    dump = ("--gen-subset", "train", "--knn-dump", folder)
    eval_lm_here(corpus, adaptive_model, *dump, "--knn-dry-run", "--knn-index", "IVF16,PQ8")
    assert list(tmp_path.iterdir()) == []
    size = tokens["train"] * (2 * 64 + 2)  # the toy model's keys, and values of 2 bytes
    expected = f"would dump {tokens['train']:,} of {tokens['train']:,} entries to {folder}: "
    said = re.search(re.escape(expected) + r"(\d+) of (\d+) shards, (.*)", caplog.text)
    assert said and said[1] == said[2]
    assert said[3] == f"{size / 1e6:.1f} MB (130 bytes per entry, keys of 64 x float16)"
    assert re.search(r"dry run: about \d+ s at [\d,]+ tokens/s", caplog.text)
    plan = r"dry run: index IVF16,PQ8: IVF16,PQ8 \(as given\), .* of memory, .* of disk and \d+ s"
    assert re.search(plan, caplog.text)
    assert "Loss" not in caplog.messages[-1]
    eval_lm_here(corpus, adaptive_model, *dump)
    # What was written is what the dry run had said.
    assert len(list(folder.glob("keys-*.npy"))) == int(said[1])
    assert len(Datastore(folder)) == tokens["train"]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    caplog.clear()
    eval_lm_here(corpus, adaptive_model, *dump, "--knn-dry-run", "--num-shards", "2", "--shard-id", "1")
    assert "would dump 0 of" in caplog.text and f"0 of {said[2]} shards" in caplog.text and "no index" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_dry_run_fails_where_the_dump_would(corpus, adaptive_model, tmp_path, monkeypatch):
    dry = ("--gen-subset", "train", "--knn-dry-run", "--knn-dump")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("precious")
    assert "not a datastore" in sentence_of(eval_lm_here, corpus, adaptive_model, *dry, tmp_path / "mine")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "free some space" in sentence_of(eval_lm_here, corpus, adaptive_model, *dry, tmp_path / "new/store")
    assert "without --knn-dump" in sentence_of(eval_lm_here, corpus, adaptive_model, "--knn-dry-run")


# --- saves ----------------------------------------------------------------------------------------------------------


def test_the_best_temperature_at_the_edge_is_said(score, tmp_path, capsys):
    score("--knn-temperature", "0.01", "--knn-save", tmp_path / "save")
    assert knnlm("tune", tmp_path / "save") == 0
    assert "is the highest one; score again with --knn-temperature 0.04" in capsys.readouterr().out


def test_temperatures_that_differ_cannot_be_swept_as_one(evaluate, corpus, adaptive_model, dump, tmp_path, capsys):
    both = ("--knn-datastore", f"{dump('train')},{dump('test')}", "--knn-temperature", "3,5")
    real = evaluate(corpus, adaptive_model, *both, "--knn-save", tmp_path / "save")
    assert "have none in common" in error_of(capsys, "sweep", tmp_path / "save", "--over", "temperature")
    assert knnlm("sweep", tmp_path / "save", "--over", "lambda", "--values", "0.25") == 0
    assert f" {2**real.loss:.2f} " in capsys.readouterr().out
    assert math.isfinite(real.loss)


def test_building_says_a_time_that_is_finite(store, caplog):
    caplog.set_level(logging.INFO)
    build_index(Datastore(store), "IVF16,SQfp16", "l2", name="timed")
    assert re.search(r"of disk while it is built, and \d+ s", caplog.text)
