"""A sweep as a table, and as files for other programs and for looking at."""

import csv
import io
from pathlib import Path

from ..errors import KnnlmError
from ..report.plots import load_pyplot, plot
from ..report.tables import table
from ..storage import make_folder, write_json, write_text
from .settings import Result
from .sweeps import Row

SUFFIXES = (".csv", ".json", ".svg", ".png")


def sweep_table(knob: str, rows: list[Row], with_weights: bool) -> str:
    header = [knob, *(["best lambda"] if with_weights else []), *Result.HEADER]
    lines = []
    for row in rows:
        weights = [",".join(f"{weight:.3f}" for weight in row.settings.weights)] if with_weights else []
        lines.append([f"{row.value:g}", *weights, *row.result.cells()])
    return table(header, lines)


def check_outputs(files: list[str]) -> None:
    for file in files:
        if Path(file).suffix not in SUFFIXES:
            raise KnnlmError(f"{file} is of no known kind; end it in {', '.join(SUFFIXES)}")
        if Path(file).suffix in (".svg", ".png"):
            load_pyplot()


def write_sweep(file: str, knob: str, rows: list[Row]) -> None:
    """One file of the sweep, of the kind that its name says."""
    path = Path(file)
    facts = [row.facts(knob) for row in rows]
    make_folder(path.parent)
    if path.suffix == ".json":
        write_json(path, facts)
    elif path.suffix == ".csv":
        output = io.StringIO(newline="")
        writer = csv.DictWriter(output, list(facts[0]))
        writer.writeheader()
        writer.writerows({**fact, "weights": " ".join(map(str, fact["weights"]))} for fact in facts)
        write_text(path, output.getvalue())
    else:
        curves = {"mixture": [row.result.mixture for row in rows], "LM alone": [row.result.lm for row in rows]}
        plot(path, [row.value for row in rows], curves, knob, "perplexity")
