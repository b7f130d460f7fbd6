"""Plots say what they show. SVG keeps text as text, so it can be read here."""

import numpy as np
import pytest
from saves import random_save

from fairseq_knnlm.report.plots import bar_panels, plot
from fairseq_knnlm.saved_runs.scores import SavedScores
from fairseq_knnlm.saved_runs.settings import Settings
from fairseq_knnlm.saved_runs.sweep_files import write_sweep
from fairseq_knnlm.saved_runs.sweeps import sweep
from fairseq_knnlm.spalm.gate_plots import heat_map


def texts(path) -> list[str]:
    """The text elements of an SVG file."""
    import xml.etree.ElementTree as ElementTree

    found = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(node.itertext()).strip() for node in found]


def test_a_plot_explains_itself(tmp_path):
    curves = {"mixture": [20.0, 15.0, 12.25, 13.0], "LM alone": [18.0] * 4}
    path = tmp_path / "k.svg"
    plot(path, [1, 4, 16, 1024], curves, "k (neighbours)", "perplexity", title="Over k", settings="valid; T 10",
         powers_of_two=True)  # fmt: skip
    found = texts(path)
    for text in ("Over k", "valid; T 10", "k (neighbours)", "perplexity", "12.25 at 16", "LM alone"):
        assert text in found, found
    assert {"1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1,024"} <= set(found)
    first = path.read_bytes()
    plot(path, [1, 4, 16, 1024], curves, "k (neighbours)", "perplexity", title="Over k", settings="valid; T 10",
         powers_of_two=True)  # fmt: skip
    assert path.read_bytes() == first


def test_of_many_curves_the_legend_has_the_best_values(tmp_path):
    curves = {name: [3.0, float(number), 4.0] for number, name in enumerate("abc")}
    plot(tmp_path / "x.svg", [0.1, 0.2, 0.3], curves, "x", "y")
    assert {"a (best 0.00 at 0.2)", "b (best 1.00 at 0.2)", "c (best 2.00 at 0.2)"} <= set(texts(tmp_path / "x.svg"))


@pytest.mark.parametrize(("best", "value"), [("least", "2"), ("most", "7.5")])
def test_the_best_bar_has_its_value(tmp_path, best, value):
    bar_panels(tmp_path / "b.svg", {"key": (["p", "q"], [2.0, 7.5])}, "nats", title="Bars", settings="valid", best=best)
    found = texts(tmp_path / "b.svg")
    assert {"Bars", "valid", "key", "nats", "p", "q"} <= set(found) and found.count(value) >= 1
    other = "7.5" if best == "least" else "2.0"
    assert other not in found


def test_a_heat_map_has_a_colour_bar(tmp_path):
    heat_map(tmp_path / "m.svg", np.eye(3), ["x", "y", "z"], "dimension", "gate", "Gates", "3 tokens")
    found = set(texts(tmp_path / "m.svg"))
    assert {"Gates", "3 tokens", "dimension", "gate", "token, in the order of the text"} <= found


@pytest.mark.parametrize("knob", ["k", "lambda", "temperature", "cache-theta", "cache-size"])
def test_a_sweep_names_what_was_fixed(tmp_path, knob):
    saved = SavedScores.open([random_save(tmp_path / "save").folder])
    rows = sweep(saved, knob, None if knob != "lambda" else [0.0, 0.1, 0.2], Settings.of_run(saved))
    write_sweep(str(tmp_path / "s.svg"), knob, rows)
    found = " | ".join(texts(tmp_path / "s.svg"))
    assert f"Perplexity over {knob.replace('-', ' ')}" in found and f"{rows[0].result.tokens:,} tokens" in found
    best = min(rows, key=lambda row: row.result.mixture)
    assert f"{best.result.mixture:.2f} at" in found
    settings = found.split(f"{rows[0].result.tokens:,} tokens")[1].split("|")[0]
    fixed = {"k": "; k ", "lambda": "; lambda ", "temperature": "; temperature ", "cache-theta": "; theta ",
             "cache-size": "; cache size "}  # fmt: skip
    for name, text in fixed.items():
        assert (text in settings) == (name != knob), (name, settings)
