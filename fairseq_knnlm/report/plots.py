"""Plots that explain themselves: a title, the settings below it, units at the axes, the best point with its value.

SVG or PNG by the file's name; the same input gives the same file.
"""

import io
import logging
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import KnnlmError
from ..storage import OutputFile, make_folder

LETTERS_PER_INCH = 15  # of the settings below a title
FEW_CURVES = 2  # of which the best points have their values beside them; of more the legend has them


def plot(
    path: str | Path,
    x: Sequence[float] | dict[str, list[float]],
    curves: dict[str, list[float]],
    x_label: str,
    y_label: str,
    log_x: bool | None = None,
    title: str = "",
    settings: str = "",
    powers_of_two: bool = False,
    mark_best: bool = True,
) -> None:
    """Curves over one axis; a curve that does not change is a dashed line to compare with.

    Args:
        x: one for all curves, or one for each
        log_x: None decides by the range
        settings: what was fixed, below the title
        powers_of_two: whether that is what the axis counts in, as for k
        mark_best: whether the least value of each curve is marked
    """
    with one_plot(path, (6, 4.2), title, settings) as (_, axes):
        changing = [name for name, values in curves.items() if not _is_constant(values)]
        for name, values in curves.items():
            places = list(x[name] if isinstance(x, dict) else x)
            if name not in changing:
                axes.plot(places, values, "--", label=name)
                continue
            best = min(range(len(values)), key=values.__getitem__)
            is_noted = mark_best and len(changing) > FEW_CURVES
            value = f"{values[best]:.2f} at {_short(places[best])}"
            label = f"{name} (best {value})" if is_noted else name
            (line,) = axes.plot(places, values, "o-", markersize=4, label=label)
            if mark_best:
                axes.plot(places[best], values[best], "o", markersize=10, fillstyle="none", color=line.get_color())
                if not is_noted:
                    side = {min(places): "left", max(places): "right"}.get(places[best], "center")
                    _note(axes, value, places[best], values[best], side)
        everything = [value for places in (x.values() if isinstance(x, dict) else [x]) for value in places]
        if powers_of_two:
            _count_in_powers_of_two(axes, everything)
        elif log_x if log_x is not None else min(everything) > 0 and max(everything) / min(everything) > 20:
            axes.set_xscale("log")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.margins(y=0.12)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


def bar_panels(
    path: str | Path,
    panels: dict[str, tuple[list[str], list[float]]],
    y_label: str,
    baseline: float | None = None,
    title: str = "",
    settings: str = "",
    best: str | None = None,
) -> None:
    """Bar charts side by side, two to a row: what the bars are by -> (labels, values).

    Args:
        best: "least" or "most": which bar is marked, and has its value written above it
    """
    pyplot = load_pyplot()
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    width = 4.5 * columns + 1.5
    with pyplot.rc_context({"svg.hashsalt": "knnlm", "svg.fonttype": "none"}):
        figure, grid = pyplot.subplots(
            rows, columns, figsize=(width, 3.2 * rows + 0.5), layout="constrained", squeeze=False
        )
        for axes, (name, (labels, values)) in zip(grid.flat, panels.items()):
            bars = axes.bar(range(len(values)), values)
            if best is not None:
                choose = min if best == "least" else max
                place = choose(range(len(values)), key=values.__getitem__)
                bars[place].set_color("tab:orange")
                texts = ["" if number != place else f"{value:.4g}" for number, value in enumerate(values)]
                axes.bar_label(bars, texts, padding=2, fontsize=9)
            axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)
            if baseline is not None:
                axes.axhline(baseline, linestyle="--", color="gray", label=f"LM alone ({baseline:.2f})")
                axes.set_ylim(bottom=0.9 * min(values), top=1.03 * max(*values, baseline))
                axes.legend(fontsize=8)
            else:
                axes.margins(y=0.12)
            axes.set_xlabel(name)
            axes.set_ylabel(y_label)
            axes.grid(alpha=0.3, axis="y")
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        lines = [title, *textwrap.wrap(settings, int(LETTERS_PER_INCH * width))]
        figure.suptitle("\n".join(line for line in lines if line), fontsize=11)
        _save(pyplot, figure, Path(path))


@contextmanager
def one_plot(path: str | Path, size: tuple[float, float], title: str = "", settings: str = "") -> Iterator[tuple]:
    """Figure and axes to draw on, below a title and the settings; saved at the end."""
    pyplot = load_pyplot()
    with pyplot.rc_context({"svg.hashsalt": "knnlm", "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        if title:
            figure.suptitle(title, fontsize=12)
        if settings:
            lines = textwrap.wrap(settings, int(LETTERS_PER_INCH * size[0]))
            axes.set_title("\n".join(lines), fontsize=8, color="0.35")
        yield figure, axes
        _save(pyplot, figure, Path(path))


def _is_constant(values: Sequence[float]) -> bool:
    return len(set(values)) == 1 and len(values) > 1


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def _note(axes: Any, text: str, x: float, y: float, side: str) -> None:
    """A note above a point, on a ground of its own, because a curve may run behind it."""
    box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    axes.annotate(text, (x, y), xytext=(0, 9), textcoords="offset points", ha=side, fontsize=9, bbox=box)


def _count_in_powers_of_two(axes: Any, values: list[float]) -> None:
    """Ticks at 1, 2, 4, ..., written as numbers; every second one where there are many."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    powers = [2**power for power in range(int(max(values)).bit_length()) if 2**power >= min(values)]
    powers = powers[:: 1 + len(powers) // 12] or [int(max(values))]
    axes.set_xticks(powers)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())


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
