"""The Python API: scores as the commands give them, samples, neighbours, and the example run as a user would."""

import runpy
import sys

import numpy as np
import pytest
from commands import REPO, eval_lm_here
from tiny import make_data, make_lines, make_model

from fairseq_knnlm import KNNLM, Datastore, KnnlmError, cli
from fairseq_knnlm.api import TextScores


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with an untrained model, its data and a datastore of the text."""
    folder = tmp_path_factory.mktemp("tiny")
    data = make_data(folder / "data", train=make_lines(120, 0), valid=make_lines(20, 1))
    model = make_model(data, folder / "model.pt")
    eval_lm_here(data, model, "--gen-subset", "train", "--knn-dump", folder / "store")
    return folder


def load(tiny, **flags) -> KNNLM:
    return KNNLM.from_pretrained(tiny, "model.pt", "data", datastore=tiny / "store", **flags)


def test_scores_are_those_of_the_command(tiny, tmp_path, capsys):
    import json

    lines = make_lines(2, 9)
    (tmp_path / "text.txt").write_text("\n".join(lines) + "\n")
    command = ["score", "--path", tiny / "model.pt", "--data", tiny / "data", "--knn-datastore", tiny / "store"]
    flags = ["--knn-lambda", "0.4", "--knn-temperature", "5", "--knn-k", "1024", "--json"]
    assert cli.main([*map(str, command), *flags, str(tmp_path / "text.txt")]) == 0
    total = json.loads(capsys.readouterr().out.splitlines()[-1])["total"]
    scores = load(tiny, lambda_=0.4, temperature=5.0, k=1024).score("\n".join(lines))
    assert scores.tokens == [word for line in lines for word in [*line.split(), "</s>"]]
    assert scores.perplexity == pytest.approx(total["mixture"]["perplexity"], rel=1e-4)
    assert scores.lm_perplexity == pytest.approx(total["lm"]["perplexity"], rel=1e-4)
    assert sum(scores.log_probs) == pytest.approx(total["mixture"]["log_prob"], rel=1e-4)


def test_the_mixture_is_what_its_parts_say(tiny):
    scores = load(tiny, lambda_=0.3, k="all").score("w1 w2 w3")
    lm, (knn,) = np.exp(scores.lm_log_probs), np.exp(scores.memory_log_probs)
    np.testing.assert_allclose(np.exp(scores.log_probs), 0.7 * lm + 0.3 * knn, rtol=1e-5)


def test_without_a_datastore_it_is_the_lm(tiny):
    lm = KNNLM.from_pretrained(tiny, "model.pt", tiny / "data")
    scores = lm.score("w1 w2")
    assert scores.perplexity == scores.lm_perplexity
    with pytest.raises(KnnlmError, match="no datastore"):
        lm.neighbors("w1 w2")


def test_neighbors_are_those_of_the_next_token(tiny):
    """A context of the datastore finds itself: at distance 0, with the token that followed."""
    datastore = Datastore(tiny / "store")
    lm = load(tiny, k=16)
    line = make_lines(120, 0)[0].split()
    found = lm.neighbors(" ".join(line[:4]), count=3)
    assert [neighbor.share for neighbor in found] == sorted((n.share for n in found), reverse=True)
    first = found[0]
    assert first.entry == 4 and first.token == line[4] and first.context == " ".join(line[:4])
    assert first.distance == pytest.approx(0, abs=1e-2)
    assert datastore.values[first.entry] == lm.dictionary.index(line[4])


def test_samples_continue_the_prompt(tiny):
    lm = load(tiny)
    one, same, other = (lm.sample("w1 w2", tokens=8, seed=seed) for seed in (1, 1, 2))
    assert one.startswith("w1 w2 ") and one == same and one != other
    assert len(lm.sample("w1 " * 100, tokens=4).split()) <= 104


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint_file": "no.pt"}, "no checkpoint"),
        ({"data_name_or_path": "nowhere"}, "dict.txt"),
        ({"datastore": "nowhere"}, "is not a datastore"),
        ({"magic": 7}, "no flag --knn-magic"),
        ({"lambda_": 2}, "--knn-lambda"),
    ],
)
def test_bad_arguments(tiny, arguments, message):
    defaults = {"checkpoint_file": "model.pt", "data_name_or_path": "data", "datastore": tiny / "store"}
    with pytest.raises(KnnlmError, match=message):
        KNNLM.from_pretrained(tiny, **{**defaults, **arguments})


def test_no_text(tiny):
    with pytest.raises(KnnlmError, match="no text"):
        load(tiny).score(" \n ")


def test_infinite_perplexity():
    assert TextScores(["a"], [-1.0], [-1e30], []).perplexity == float("inf")


def test_the_example_runs(tiny, monkeypatch, capsys):
    example = REPO / "examples/python/tour.py"
    monkeypatch.setattr(sys, "argv", [str(example), str(tiny), "model.pt", "data", str(tiny / "store")])
    runpy.run_path(str(example), run_name="__main__")
    output = capsys.readouterr().out
    assert "of the LM alone" in output and output.count("[5 6 7]") == 2
