"""The two plots of the gate."""

from pathlib import Path

import numpy as np

from ..report.plots import one_plot


def histogram(
    path: Path, edges: np.ndarray, shares: np.ndarray, x_label: str, y_label: str, title: str = "", settings: str = ""
) -> None:
    """edges (n + 1,), shares (n,)."""
    with one_plot(path, (6, 3.6), title, settings) as (_, axes):
        axes.stairs(shares, edges, fill=True)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_xlim(0, 1)
        axes.grid(alpha=0.3, axis="y")


def heat_map(
    path: Path,
    values: np.ndarray,
    labels: list[str],
    y_label: str,
    color_label: str,
    title: str = "",
    settings: str = "",
) -> None:
    """values (rows, columns) between 0 and 1, a label for each column; a bar beside it says what the colours mean."""
    with one_plot(path, (max(6.0, 0.17 * len(labels) + 1.5), 4.0), title, settings) as (figure, axes):
        image = axes.imshow(values, aspect="auto", vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
        axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
        axes.set_xlabel("token, in the order of the text")
        axes.set_ylabel(y_label)
        figure.colorbar(image, label=color_label)
