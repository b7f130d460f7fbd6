"""knnlm learn and --knn-head: trained on a tiny datastore, scored, saved, tuned, swept, generated with, looked at."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from commands import error_of, eval_lm_here, interactive_here, knnlm, make_table, sentence_of
from tiny import make_data, make_lines, make_model

from fairseq_knnlm import KNNLM, Datastore, cli
from fairseq_knnlm.heads import open_head
from fairseq_knnlm.heads.learning import Learning
from fairseq_knnlm.saved_runs.format import SavePart
from fairseq_knnlm.saved_runs.scores import SavedScores


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with an untrained model, its data, datastores and saves of both splits, and two heads."""
    folder = tmp_path_factory.mktemp("heads")
    data = make_data(folder / "data", train=make_lines(200, 0), valid=make_lines(40, 1))
    model = make_model(data, folder / "model.pt")
    for split in ("train", "valid"):
        eval_lm_here(data, model, "--gen-subset", split, "--knn-dump", folder / split)
        eval_lm_here(data, model, "--gen-subset", split, "--knn-save", folder / f"{split}-save")
    learn(folder, "head", "--epochs", "20", "--rate", "0.02")
    learn(folder, "other", "--rows", "2x", "--metric", "l2", "--epochs", "5")
    return folder


def learn(tiny, name, *flags, out=None) -> int:
    return knnlm("learn", "--datastore", tiny / "train", "--batch", "200", *flags, "-o", (out or tiny) / name)


def score(tiny, *flags) -> float:
    return float(eval_lm_here(tiny / "data", tiny / "model.pt", "--gen-subset", "valid", *flags)["loss"])


def refused(tiny, *flags, model="model.pt", data="data") -> str:
    return sentence_of(eval_lm_here, tiny / data, tiny / model, "--gen-subset", "valid", *flags)


def head_log_probs(tiny, name) -> np.ndarray:
    """log p of valid by a head, from the keys of a datastore of it."""
    head, _ = open_head(tiny / name)
    store = Datastore(tiny / "valid")
    keys = torch.from_numpy(store.gather_keys(np.arange(len(store))).astype(np.float32))
    return head.target_log_probs(keys, torch.from_numpy(store.values.astype(np.int64))).double().numpy()


# --- using heads ------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_head_mixed(tiny):
    lm = SavePart.open(tiny / "valid-save").arrays["lm"].astype(np.float64)
    head, other = head_log_probs(tiny, "head"), head_log_probs(tiny, "other")
    expected = -np.log2(0.7 * np.exp(lm) + 0.3 * np.exp(head)).mean()
    assert score(tiny, "--knn-head", tiny / "head", "--knn-head-lambda", "0.3") == pytest.approx(expected, abs=2e-3)
    assert expected < -lm.mean() / math.log(2)  # it has learnt something
    expected = -np.log2(0.5 * np.exp(lm) + 0.3 * np.exp(head) + 0.2 * np.exp(other)).mean()
    assert knnlm("verify", tiny / "head") == 0
    both = ["--knn-head", f"{tiny / 'head'},{tiny / 'other'}", "--knn-head-lambda", "0.3,0.2"]
    assert score(tiny, *both) == pytest.approx(expected, abs=2e-3)


@pytest.fixture(scope="module")
def save(tiny):
    """Datastore, two heads and a cache, saved."""
    flags = ["--knn-datastore", tiny / "train", "--knn-head", f"{tiny / 'head'},{tiny / 'other'}"]
    flags += ["--knn-lambda", "0.2", "--knn-head-lambda", "0.2,0.1", "--knn-cache-size", "50"]
    loss = score(tiny, *flags, "--knn-save", tiny / "all-save")
    return tiny / "all-save", flags, loss


def test_saves_hold_heads(tiny, save):
    folder, _, loss = save
    part = SavePart.open(folder)
    assert [memory.name for memory in part.run.memories] == ["knn0", "head0", "head1", "cache"]
    kinds = [(memory.is_head, memory.is_cache) for memory in part.run.memories]
    assert kinds == [(False, False), (True, False), (True, False), (False, True)]
    np.testing.assert_allclose(part.arrays["head0.log_probs"][:, 0], head_log_probs(tiny, "head"), atol=0.02)
    assert math.log2(part.run.perplexity) == pytest.approx(loss, abs=1e-4)
    assert [memory.name for memory in SavedScores.open([folder]).knn_memories] == ["knn0"]


def test_tuned_flags_give_what_tune_promises(tiny, save, capsys):
    folder, flags, loss = save
    assert knnlm("tune", folder) == 0
    output = capsys.readouterr().out
    found = next(line for line in output.splitlines() if line.startswith("--knn-"))
    assert len(re.search(r"--knn-head-lambda (\S+)", found)[1].split(",")) == 2
    expected = float(re.search(r"a perplexity of ([\d.]+)", output)[1].rstrip("."))
    tuned = score(tiny, *flags[:4], *found.split())
    assert 2**tuned == pytest.approx(expected, rel=1e-4) and tuned < loss
    assert knnlm("tune", folder, "--without", "head1", "--without", "knn0", "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert len(output["weights"]) == 2 and "--knn-lambda" not in output["flags"]


def test_sweep_over_the_weight_of_heads(tiny, save, capsys, tmp_path):
    folder, flags, _ = save
    file = tmp_path / "sweep.json"
    assert knnlm("sweep", folder, "--over", "head-lambda", "--values", "0.05,0.3", "-o", file) == 0
    rows = json.loads(file.read_text())
    assert rows[1]["weights"] == [0.2, 0.3, 0.3, 0.1]
    changed = [*flags, "--knn-head-lambda", "0.05", "--knn-temperature"]
    temperature = SavePart.open(folder).run.memories[0].temperatures[0]
    assert math.log2(rows[0]["mixture"]) == pytest.approx(score(tiny, *changed, temperature), abs=1e-4)
    assert knnlm("sweep", folder, "--over", "k", "--values", "1") == 1
    svg = tmp_path / "sweep.svg"
    assert knnlm("sweep", folder, "--over", "lambda", "-o", svg) == 0 and "head lambda" in svg.read_text()


def test_kept_values_are_for_the_same_heads(tiny, save, capsys, caplog):
    folder, flags, _ = save
    bare = flags[:4]
    try:
        assert knnlm("tune", folder, "--without", "cache", "--keep", "--json") == 0
        kept = json.loads(capsys.readouterr().out)
        result = next(value for name, value in kept["results"].items() if name.endswith("tuned on it"))
        assert 2 ** score(tiny, *bare) == pytest.approx(result["mixture"], rel=1e-4)
        assert "head lambda" in caplog.text
        caplog.clear()
        score(tiny, *bare[:2])  # another mixture
        assert "are not used: they are for a mixture with heads" in caplog.text
    finally:
        (tiny / "train" / "tuned.json").unlink()


def test_values_kept_in_a_head(tiny, tmp_path, capsys):
    shutil.copytree(tiny / "head", tmp_path / "head")
    score(tiny, "--knn-head", tmp_path / "head", "--knn-save", tmp_path / "save")
    assert knnlm("tune", tmp_path / "save", "--keep", "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert output["kept"] == [str(tmp_path / "head" / "tuned.json")]
    result = next(value for name, value in output["results"].items() if name.endswith("tuned on it"))
    assert 2 ** score(tiny, "--knn-head", tmp_path / "head") == pytest.approx(result["mixture"], rel=1e-4)
    assert knnlm("sweep", tmp_path / "save", "--over", "head-lambda", "--values", "0.5") == 0


def test_generation_text_and_page(tiny, tmp_path, capsys):
    flags = ["--knn-head", tiny / "head", "--knn-head-lambda", "0.4"]
    prompts = interactive_here(
        tiny / "data", tiny / "model.pt", ["w1 w2"], *flags, "--buffer-size", "1", "--max-len-b", "8", "--beam", "2"
    )
    text = re.search(r"^H-0\t\S+\t(.*)$", prompts.stdout, re.MULTILINE)[1]
    scores = [float(s) * math.log(2) for s in re.search(r"^P-0\t(.*)$", prompts.stdout, re.MULTILINE)[1].split()]
    (tmp_path / "text.txt").write_text(text + "\n")
    model = ["--path", tiny / "model.pt", "--data", tiny / "data", *flags]
    assert knnlm("score", *model, "--json", "--tokens", tmp_path / "text.txt") == 0
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    ours = [token["mixture"] for token in line["token_scores"]]
    count = min(len(ours), len(scores))
    np.testing.assert_allclose(scores[2:count], ours[2:count], atol=2e-3)
    lm = KNNLM.from_pretrained(tiny, "model.pt", "data", head=tiny / "head", head_lambda=0.4)
    assert lm.score(text).log_probs == pytest.approx(ours, abs=1e-3)
    assert knnlm("inspect", *model, "--text", text, "-o", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert '"rows": 204' in page or '"rows":204' in page
    assert "nothing to look into" in error_of(capsys, "inspect", *model[:4], "--text", "w1")


# --- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ["--rows", "frequency:3", "--init", "centres"],
        ["--rows", "loss:2", "--save", "train-save"],
        ["--kind", "mos", "--components", "3", "--path", "model.pt", "--data", "data", "--embedding", "fixed"],
        ["--kind", "clusters", "--rows", "2x"],
        ["--kind", "clusters", "--fine-tune", "--softmax", "sampled", "--negatives", "50"],
        ["--kind", "network", "--imitate", "table", "--softmax", "sampled", "--negatives", "40"],
        ["--interpolated", "train-save", "--lambda", "0.4", "--valid-save", "valid-save"],
    ],
    ids=lambda flags: " ".join(flags[:4]),
)
def test_every_kind(tiny, tmp_path, flags):
    if "table" in flags:
        assert make_table(tiny / "train", tiny / "train", tmp_path / "table", "--k", "8") == 0
        flags = [tmp_path / "table" if word == "table" else word for word in flags]
    flags = [tiny / word if str(word) in ("train-save", "valid-save", "model.pt", "data") else word for word in flags]
    assert learn(tiny, "new", *flags, "--epochs", "3", "--valid", tiny / "valid", out=tmp_path) == 0
    head, facts = open_head(tmp_path / "new")
    assert not (tmp_path / "new.partial").exists() and not (tmp_path / "new.lock").exists()
    keys = torch.randn(20, head.rows.size(1))
    everything = head.vocabulary_log_probs(keys).double().exp()
    np.testing.assert_allclose(everything.sum(dim=1), 1, rtol=1e-4)
    assert facts.row_count == len(head.rows) and facts.training["results"]
    bare = score(tiny)
    assert score(tiny, "--knn-head", tmp_path / "new", "--knn-head-lambda", "0.2") < bare


def test_a_killed_training_goes_on_to_the_same_head(tiny, tmp_path, monkeypatch, capsys):
    flags = ["--rows", "2x", "--epochs", "4", "--softmax", "sampled", "--negatives", "30", "--valid", tiny / "valid"]
    from fairseq_knnlm.heads import making

    class Often(making.Plan):
        def __init__(self, *values):
            super().__init__(*values, interval=7)

    monkeypatch.setattr(making, "Plan", Often)
    assert learn(tiny, "whole", *flags, out=tmp_path) == 0
    ordinary = Learning.step

    def dies(self, number, batch):
        if number == 25:
            raise KeyboardInterrupt
        return ordinary(self, number, batch)

    monkeypatch.setattr(Learning, "step", dies)
    assert learn(tiny, "parts", *flags, out=tmp_path) == 130
    assert "goes on" in capsys.readouterr().err
    assert (tmp_path / "parts.partial" / "progress.json").exists() and not (tmp_path / "parts").exists()
    assert "another training" in error_of(
        capsys, "learn", "--datastore", tiny / "train", "--batch", 200, *flags, "--seed", 5, "-o", tmp_path / "parts"
    )
    steps = []
    monkeypatch.setattr(Learning, "step", lambda *args: (steps.append(args[1]), ordinary(*args))[1])
    assert learn(tiny, "parts", *flags, out=tmp_path) == 0
    assert steps[0] == 21
    (whole, facts), (parts, other) = open_head(tmp_path / "whole"), open_head(tmp_path / "parts")
    assert torch.equal(whole.rows, parts.rows) and facts.fingerprint == other.fingerprint
    assert facts.training["results"] == other.training["results"]


def test_a_compact_datastore_gives_a_head_that_projects(tiny, tmp_path):
    assert knnlm("compact", tiny / "train", "--dim", "8", "--dtype", "int8", "-o", tmp_path / "compact") == 0
    assert knnlm("learn", "--datastore", tmp_path / "compact", "--epochs", "3", "-o", tmp_path / "head") == 0
    head, facts = open_head(tmp_path / "head")
    assert head.projection.shape == (8, 32) and (facts.dim, facts.source_dim) == (8, 32)
    states = torch.randn(5, 32)
    expected = Datastore(tmp_path / "compact").codec.project(states.numpy())
    np.testing.assert_allclose(head.project(states), expected, rtol=1e-5)
    score(tiny, "--knn-head", tmp_path / "head")


# --- bad input --------------------------------------------------------------------------------------------------------


def test_heads_that_do_not_fit(tiny, tmp_path):
    head = ["--knn-head", tiny / "head"]
    other = make_model(tiny / "data", tiny / "other.pt", seed=5)
    assert "another checkpoint" in refused(tiny, *head, model=other.name)
    larger = make_model(tiny / "data", tiny / "larger.pt", dim=64)
    assert "dimension 32, the model has 64" in refused(tiny, *head, model=larger.name)
    assert "reads the key ffn_input_ln, not output" in refused(tiny, *head, "--knn-key", "output")
    assert "layer 1, not 0" in refused(tiny, *head, "--knn-layer", "0")
    data = make_data(tiny / "words", valid=make_lines(5, 1))
    words = (data / "dict.txt").read_text().splitlines()
    (data / "dict.txt").write_text("\n".join(reversed(words)) + "\n")
    assert "another dictionary" in refused(tiny, *head, data="words")
    assert "is not a head" in refused(tiny, "--knn-head", tiny / "train")


def test_weights_that_do_not_fit(tiny):
    head = ["--knn-head", tiny / "head"]
    assert "their sum at most 1" in refused(tiny, *head, "--knn-head-lambda", "1.5")
    assert "2 values for 1 heads" in refused(tiny, *head, "--knn-head-lambda", "0.1,0.2")
    beside = ["--knn-datastore", tiny / "train", "--knn-lambda", "0.7"]
    assert "at most 1 together" in refused(tiny, *head, *beside, "--knn-head-lambda", "0.4")
    cache = ["--knn-cache-size", "10", "--knn-cache-lambda", "0.7"]
    assert "at most 1 together" in refused(tiny, *head, *cache, "--knn-head-lambda", "0.4")
    assert "does nothing without --knn-head" in refused(tiny, "--knn-head-lambda", "0.4")
    assert "are for scoring" in refused(tiny, *head, "--knn-dump", tiny / "nothing")


@pytest.mark.parametrize("file", ["rows.npy", "row_counts.npy", "head.json"])
def test_damaged_heads(tiny, tmp_path, file):
    shutil.copytree(tiny / "head", tmp_path / "head")
    path = tmp_path / "head" / file
    content = bytearray(path.read_bytes())
    content[-40 if file != "head.json" else 20] ^= 0xFF
    path.write_bytes(content)
    assert knnlm("verify", tmp_path / "head") == 1
    assert "damaged" in refused(tiny, "--knn-head", tmp_path / "head")
    path.unlink()
    assert "knnlm learn" in refused(tiny, "--knn-head", tmp_path / "head")


def test_bad_flags(tiny, tmp_path, capsys):
    def error(*flags, out="new") -> str:
        return error_of(capsys, "learn", "--datastore", tiny / "train", *flags, "-o", tmp_path / out)

    assert "--rows takes" in error("--rows", "many")
    assert "needs the LM's loss" in error("--rows", "loss:2")
    assert "needs the model" in error("--init", "lm")
    assert "nothing to learn" not in error("--kind", "clusters", "--rows", "frequency:2")
    assert "does nothing with --kind embedding" in error("--components", "4")
    assert "does nothing with --kind mos" in error("--kind", "mos", "--fine-tune")
    assert "does nothing with --kind clusters" in error("--kind", "clusters", "--init", "random")
    assert "goes with --interpolated" in error("--lambda", "0.3")
    assert "give --valid-save" in error("--interpolated", tiny / "train-save", "--valid", tiny / "valid")
    assert "is of another data" in error("--interpolated", tiny / "valid-save")
    assert "--rate must be above 0" in error("--rate", "0")
    assert "clusters need as many entries" in error("--kind", "clusters", "--rows", "60x")
    assert make_table(tiny / "train", tiny / "valid", tmp_path / "table") == 0
    assert "is not of the entries" in error("--kind", "network", "--imitate", tmp_path / "table")
    (tmp_path / "there").mkdir()
    assert "exists already" in error(out="there")
    (tmp_path / "mine.partial").mkdir()
    (tmp_path / "mine.partial" / "letter.txt").write_text("dear")
    assert "in the way" in error(out="mine")
    assert (tmp_path / "mine.partial" / "letter.txt").read_text() == "dear"
    assert cli.main(["learn", "--datastore", str(tmp_path / "nothing"), "-o", str(tmp_path / "new")]) == 1
    assert not (tmp_path / "new").exists() and not (tmp_path / "new.partial").exists()
