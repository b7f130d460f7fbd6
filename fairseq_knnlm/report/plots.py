"""Plots that a person would rather look at: curves and bar charts, SVG or PNG; the same input gives the same file."""

import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import KnnlmError
from ..storage import OutputFile, make_folder


def plot(
    path: str | Path,
    x: Sequence[float] | dict[str, list[float]],
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
    pyplot = load_pyplot()
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
    pyplot = load_pyplot()
    with pyplot.rc_context({"svg.hashsalt": "knnlm", "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        yield figure, axes
        _save(pyplot, figure, Path(path))


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    make_folder(path.parent)
    image = io.BytesIO()
    metadata = {"Date": None} if path.suffix == ".svg" else {}  # no date: the same file again
    figure.savefig(image, format=path.suffix[1:], metadata=metadata, dpi=150)
    pyplot.close(figure)
    with OutputFile(path) as file:
        file.write(image.getvalue())


def load_pyplot() -> Any:
    for chatty in ("matplotlib", "PIL"):  # fairseq may have set the root logger to everything
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        import matplotlib
    except ImportError as error:
        raise KnnlmError("plots need matplotlib; run pip install 'fairseq-knnlm[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
