"""Tables, files and plots of results."""

import csv
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import KnnlmError
from .choice import Result
from .sweep import Row

SUFFIXES = (".csv", ".json", ".svg", ".png")


def table(header: list[str], rows: list[list[str]], markdown: bool = False, left: tuple[str, ...] = ()) -> str:
    """Aligned columns for people (numbers to the right, the columns in ``left`` to the left); Markdown for pages."""
    if markdown:
        lines = [header, ["---"] * len(header), *rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(len(line[column]) for line in [header, *rows]) for column in range(len(header))]
    justify = [str.ljust if name in left else str.rjust for name in header]
    lines = [[j(cell, width) for j, cell, width in zip(justify, line, widths)] for line in [header, *rows]]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def sweep_table(knob: str, rows: list[Row], with_weights: bool) -> str:
    header = [knob, *(["best lambda"] if with_weights else []), *Result.HEADER]
    lines = []
    for row in rows:
        weights = [",".join(f"{weight:.3f}" for weight in row.choice.weights)] if with_weights else []
        lines.append([f"{row.value:g}", *weights, *row.result.cells()])
    return table(header, lines)


def check_outputs(files: list[str]) -> None:
    for file in files:
        if Path(file).suffix not in SUFFIXES:
            raise KnnlmError(f"{file} is of no known kind; end it in {', '.join(SUFFIXES)}")
        if Path(file).suffix in (".svg", ".png"):
            _pyplot()


def write_sweep(file: str, knob: str, rows: list[Row]) -> None:
    """One file of the sweep, of the kind that its name says."""
    path = Path(file)
    facts = [row.facts(knob) for row in rows]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            path.write_text(json.dumps(facts, indent=1) + "\n")
        elif path.suffix == ".csv":
            with open(path, "w", newline="") as output:
                writer = csv.DictWriter(output, list(facts[0]))
                writer.writeheader()
                writer.writerows({**fact, "weights": " ".join(map(str, fact["weights"]))} for fact in facts)
        else:
            curves = {"mixture": [row.result.mixture for row in rows], "LM alone": [row.result.lm for row in rows]}
            plot(path, [row.value for row in rows], curves, knob, "perplexity")
    except OSError as error:
        raise KnnlmError(f"{path} cannot be written ({error.strerror}); choose another -o") from error


def plot(
    path: str | Path,
    x: list[float] | dict[str, list[float]],
    curves: dict[str, list[float]],
    x_label: str,
    y_label: str,
    log_x: bool | None = None,
) -> None:
    """Curves over one axis, SVG or PNG by the file's name; the same input gives the same file.

    Args:
        x: one for all curves, or one for each
        log_x: None decides by the range
    """
    with one_plot(path, (6, 3.8)) as (_, axes):
        for name, values in curves.items():
            places = x[name] if isinstance(x, dict) else x
            constant = len(set(values)) == 1 and len(values) > 1
            axes.plot(places, values, "--" if constant else "o-", markersize=4, label=name)
        everything = [value for places in (x.values() if isinstance(x, dict) else [x]) for value in places]
        if log_x if log_x is not None else min(everything) > 0 and max(everything) / min(everything) > 20:
            axes.set_xscale("log")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(alpha=0.3)
        axes.legend()


def bar_panels(
    path: str | Path, panels: dict[str, tuple[list[str], list[float]]], y_label: str, baseline: float | None = None
) -> None:
    """Bar charts side by side, two to a row: title -> (labels, values)."""
    pyplot = _pyplot()
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with pyplot.rc_context({"svg.hashsalt": "knnlm", "svg.fonttype": "none"}):
        figure, grid = pyplot.subplots(
            rows, columns, figsize=(4.5 * columns + 1.5, 3.2 * rows), layout="constrained", squeeze=False
        )
        for axes, (title, (labels, values)) in zip(grid.flat, panels.items()):
            axes.bar(range(len(values)), values)
            axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)
            if baseline is not None:
                axes.axhline(baseline, linestyle="--", color="gray", label="LM alone")
                axes.set_ylim(bottom=0.9 * min(values))
                axes.legend()
            axes.set_ylabel(y_label)
            axes.set_title(title)
            axes.grid(alpha=0.3, axis="y")
        _save(pyplot, figure, Path(path))


@contextmanager
def one_plot(path: str | Path, size: tuple[float, float]) -> Iterator[tuple]:
    """Figure and axes to draw on, saved at the end."""
    pyplot = _pyplot()
    with pyplot.rc_context({"svg.hashsalt": "knnlm", "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        yield figure, axes
        _save(pyplot, figure, Path(path))


def _save(pyplot, figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {}, dpi=150)  # no date: same file again
    pyplot.close(figure)


def _pyplot():
    for chatty in ("matplotlib", "PIL"):  # fairseq may have set the root logger to everything
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        import matplotlib
    except ImportError as error:
        raise KnnlmError("plots need matplotlib; run pip install 'fairseq-knnlm[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
