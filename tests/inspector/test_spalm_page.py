"""The inspector's page of a SPALM: probabilities, gate and neighbours against its parts."""

import json
import re

import numpy as np
import pytest
import torch
from commands import SPALM_SCORING, error_of, knnlm

from fairseq_knnlm.data.neighbor_table import NeighborTable
from fairseq_knnlm.spalm.analysis import SplitReader, read_gates


def page_data(path) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data"[^>]*>(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(text)


def test_page_of_a_split(evaluate, corpus, adaptive_model, spalm, neighbors, dump, tmp_path, capsys):
    """What fairseq-eval-lm, knnlm spalm gates and the table say of the same tokens."""
    flags = ["inspect", "--path", spalm, "--data", corpus, "--datastore", dump("train"), "--key-lm", adaptive_model]
    flags += ["--segment", 32, "--knn-nprobe", 8, "-o", tmp_path / "page.html"]
    assert knnlm(*flags, "--split", "valid", "--from", 0, "--tokens", 60) == 0
    data = page_data(tmp_path / "page.html")
    tokens = data["tokens"]
    assert len(tokens) == 60 and data["about"]["kind"] == "spalm"
    scores = evaluate(corpus, spalm, *SPALM_SCORING, "--neighbors", neighbors).scores[:60]
    table = NeighborTable(neighbors / "valid")
    gates = read_gates(SplitReader(str(spalm), str(corpus), str(neighbors), "valid", 32, None), 0, 60, 1)
    # The dump of valid has blocks of 32 tokens with as many before them, and the live LM reads as the dump did.
    np.testing.assert_array_equal([[near["entry"] for near in token["near"]] for token in tokens], table.ids(0, 60))
    np.testing.assert_allclose(np.log([token["mix"] for token in tokens]), scores, atol=2e-3)
    np.testing.assert_allclose([1 - token["g"][0] for token in tokens], gates.means, atol=1e-4)
    for token in tokens:
        assert sum(near["share"] for near in token["near"]) == pytest.approx(1, abs=1e-4)
        hits = [near["share"] for near in token["near"] if near["w"] == token["w"]]
        assert token["knn"] == pytest.approx(sum(hits), abs=1e-5)
    assert data["about"]["mix"] == pytest.approx(np.exp(-np.mean(scores)), rel=1e-3)
    assert knnlm(*flags, "--text", "w1 w2 w3") == 0 and len(page_data(tmp_path / "page.html")["tokens"]) == 4
    assert "60 tokens, perplexity" in capsys.readouterr().out
    assert "--serve is for kNN-LMs" in error_of(capsys, *flags, "--serve")


def test_a_model_that_is_no_spalm(corpus, adaptive_model, xl, dump, capsys):
    flags = ["--data", corpus, "--datastore", dump("train"), "--key-lm", adaptive_model, "--text", "w1"]
    assert "is no SPALM" in error_of(capsys, "inspect", "--path", xl, *flags)
    assert torch.is_grad_enabled()
