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

AXES = {  # what is swept over, with its unit
    "lambda": "lambda (weight of the datastore)",
    "temperature": "temperature (in units of the distance)",
    "k": "k (neighbours per token)",
    "head-lambda": "head lambda (weight of the head)",
    "cache-lambda": "cache lambda (weight of the cache)",
    "cache-theta": "cache theta (per unit of the inner product)",
    "cache-size": "cache size (tokens)",
}
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
        plot(
            path, [row.value for row in rows], curves, AXES[knob], "perplexity (per token)",
            title=f"Perplexity over {knob.replace('-', ' ')}", settings=fixed_settings(knob, rows),
            powers_of_two=knob in ("k", "cache-size"),
        )  # fmt: skip


def fixed_settings(knob: str, rows: list[Row]) -> str:
    """What the points of a sweep have in common, in words."""
    settings, result = rows[0].settings, rows[0].result
    is_retuned = not knob.endswith("lambda") and len({row.settings.weights for row in rows}) > 1
    has_cache, knn = settings.cache_size is not None, len(settings.temperatures)
    heads = settings.weights[knn : len(settings.weights) - has_cache]
    parts = [f"{result.tokens:,} tokens" + (f" of {rows[0].split}" if rows[0].split else "")]
    if is_retuned:
        parts.append("lambda at its best for each point")
    elif knob != "lambda" and knn:
        parts.append("lambda " + ", ".join(f"{weight:.4g}" for weight in settings.weights[:knn]))
    if heads and knob != "head-lambda" and not is_retuned:
        parts.append("head lambda " + ", ".join(f"{weight:.4g}" for weight in heads))
    if knn:
        parts += [f"k {settings.k or 'all'}"] if knob != "k" else []
        temperatures = ", ".join(f"{temperature:.4g}" for temperature in dict.fromkeys(settings.temperatures))
        parts += [f"temperature {temperatures}"] if knob != "temperature" else []
    if has_cache:
        parts += [f"cache lambda {settings.weights[-1]:.4g}"] if knob != "cache-lambda" and not is_retuned else []
        parts += [f"cache size {settings.cache_size}"] if knob != "cache-size" else []
        parts += [f"theta {settings.theta:.4g}"] if knob != "cache-theta" else []
    return "; ".join(parts)
