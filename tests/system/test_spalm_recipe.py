"""The SPALM recipe, end to end on the characters of generated text."""

import json
import re

import pytest
from test_recipes import recipe
from tiny import write_lines

MODELS = ["Transformer", "Transformer-XL", "kNN-LM", "SPALM", "SPALM + kNN"]


@pytest.mark.slow
def test_enwik8(tmp_path):
    """Five rows, with bits per character; the analysis and its plots; a second run does nothing again."""
    write_lines(tmp_path / "text", 60, 1)
    settings = {"ENWIK8": tmp_path / "text", "OUT": tmp_path / "out"}
    output = recipe("enwik8/run.sh", tmp_path / "work", **settings)
    output = output[output.rindex("second half of valid") :]
    rows = re.findall(r"^(\S.*?)\s{2,}([\d.]+)\s+([\d.]+)$", output, re.MULTILINE)
    assert [name.split(" (")[0] for name, _, _ in rows] == MODELS
    for _, perplexity, bits in rows:
        assert 2 ** float(bits) == pytest.approx(float(perplexity), rel=0.01)
    results = json.loads((tmp_path / "out/spalm.json").read_text())
    assert [row["k"] for row in results["k"]["rows"]] == [1, 2, 4] and results["k"]["trained_k"] == 2
    page = (tmp_path / "out/spalm.md").read_text()
    plots = re.findall(r"!\[.*?\]\((.*?)\)", page)
    # where no token gains by 0.1, there is nothing to plot of the gains
    assert len(plots) in (4, 5) and all((tmp_path / "out" / plot).exists() for plot in plots)
    assert "[train-spalm] done before" in recipe("enwik8/run.sh", tmp_path / "work", **settings)
