"""SPALM that generates with live retrieval: its scores are those of a table that was computed for the same text."""

import re

import numpy as np
import pytest
from commands import SPALM_SCORING, eval_lm_here, interactive_here, make_table, preprocess_here, sentence_of

from fairseq_knnlm.data.neighbor_table import NeighborTable

# As the datastore's table is searched: knnlm neighbors visits as many lists by default.
NPROBE = ["--knn-nprobe", "8"]
GENERATING = ["--task", "spalm", "--tokens-per-sample", "32", "--buffer-size", "4", "--max-tokens", "2000"]


def table_scores(evaluate, corpus, model, adaptive_model, dump, text, folder, *flags) -> np.ndarray:
    """Scores of a line by fairseq-eval-lm with a table that knnlm neighbors made."""
    (folder / "text.txt").write_text(text + "\n")
    data = preprocess_here(folder / "bin", corpus / "dict.txt", test=folder / "text.txt")
    eval_lm_here(data, adaptive_model, "--gen-subset", "test", "--knn-dump", folder / "queries")
    assert make_table(dump("train"), folder / "queries", folder / "tables/test", "--k", "4") == 0
    return evaluate(data, model, *SPALM_SCORING, "--neighbors", folder / "tables", *flags, split="test").scores


@pytest.mark.parametrize("beam", [1, 3])
def test_scores_are_those_of_a_table(evaluate, corpus, adaptive_model, spalm, dump, tmp_path, beam):
    """A text of several segments of SPALM, and of more than one block of the frozen LM."""
    live = ["--knn-key-lm", adaptive_model, "--knn-datastore", dump("train"), *NPROBE]
    prompts = ["w1 w2 w3", "w7 w8 w9"]
    result = interactive_here(
        corpus, spalm, prompts, *GENERATING, *live, "--beam", beam, "--min-len", "75", "--max-len-b", "80"
    )
    texts = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", result.stdout, re.MULTILINE))
    scores = dict(re.findall(r"^P-(\d+)\t(.*)$", result.stdout, re.MULTILINE))
    assert len(texts) == 2 and re.search(r"SPALM: \d+ steps of .* frozen LM and search [\d.]+ ms", result.log)
    for number, prompt in enumerate(prompts):
        text = texts[str(number)]
        assert text.startswith(prompt) and len(text.split()) > 70
        folder = tmp_path / str(number)
        folder.mkdir()
        expected = table_scores(evaluate, corpus, spalm, adaptive_model, dump, text, folder)
        ours = np.array(list(map(float, scores[str(number)].split()))) * np.log(2)
        first = len(prompt.split())
        np.testing.assert_allclose(ours[first : len(text.split())], expected[first:-1], atol=2e-3)
        assert len(NeighborTable(folder / "tables/test")) == len(expected)


def test_the_transformer_xl_generates_too(evaluate, corpus, xl, tmp_path):
    result = interactive_here(corpus, xl, ["w1 w2"], *GENERATING, "--beam", "1", "--max-len-b", "50")
    (text,) = re.findall(r"^H-0\t\S+\t(.*)$", result.stdout, re.MULTILINE)
    (scores,) = re.findall(r"^P-0\t(.*)$", result.stdout, re.MULTILINE)
    (tmp_path / "text.txt").write_text(text + "\n")
    data = preprocess_here(tmp_path / "bin", corpus / "dict.txt", test=tmp_path / "text.txt")
    expected = evaluate(data, xl, *SPALM_SCORING, split="test").scores
    ours = np.array(list(map(float, scores.split()))) * np.log(2)
    np.testing.assert_allclose(ours[2 : len(text.split())], expected[2:-1], atol=1e-3)


def test_bad_input(corpus, adaptive_model, plain_model, spalm, xl, neighbors, dump):
    store = ["--knn-datastore", dump("train")]

    def sentence(model, *flags) -> str:
        return sentence_of(interactive_here, corpus, model, ["w1"], *GENERATING, *flags)

    assert "give --knn-key-lm" in sentence(spalm) and "give --knn-key-lm" in sentence(spalm, *store)
    live = [*store, "--knn-key-lm", adaptive_model]
    assert "another checkpoint than --knn-key-lm" in sentence(spalm, *store, "--knn-key-lm", plain_model)
    assert "--knn-lambda is for a mixture" in sentence(spalm, *live, "--knn-lambda", "0.3")
    assert "a table of a split" in sentence(spalm, *live, "--neighbors", neighbors)
    assert "reads no retrieved tokens" in sentence(xl, *live)
    reading = [*SPALM_SCORING, "--gen-subset", "valid", "--neighbors", neighbors]
    scoring = sentence_of(eval_lm_here, corpus, spalm, *reading, *live)
    assert "make its table with knnlm neighbors" in scoring
