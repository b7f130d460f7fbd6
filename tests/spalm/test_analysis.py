"""What a trained SPALM does with its memory."""

import json
import re

import numpy as np
import pytest
import torch
from commands import SPALM_SCORING, knnlm

from fairseq_knnlm.data.neighbor_table import NeighborTable
from fairseq_knnlm.datastore import Datastore


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
    for k in (1, 4):
        flags = [*SPALM_SCORING, "--neighbors", neighbors, "--model-overrides", f"{{'neighbors_used': {k}}}"]
        scores = evaluate(corpus, spalm, *flags).scores[:500]
        assert rows[k] == pytest.approx(np.exp(-scores.mean()), rel=1e-4)
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
        evaluate(corpus, spalm, *SPALM_SCORING, "--neighbors", neighbors, "--knn-save", tmp_path / "spalm").scores,
        evaluate(corpus, xl, *SPALM_SCORING, "--knn-save", tmp_path / "xl").scores,
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
