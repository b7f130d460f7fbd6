"""The page of ``benchmarks.cluster`` and the sizing table of docs/cluster.md, from its JSON."""

import json
import re
from pathlib import Path

from fairseq_knnlm.report.tables import table
from fairseq_knnlm.storage import write_text

from .cluster_simulation import NODE_MEMORY, NODE_PROCESSORS

BEGIN, END = "<!-- sizing: written by python -m benchmarks.cluster --report -->", "<!-- end of sizing -->"
GUIDE = Path(__file__).resolve().parent.parent / "docs" / "cluster.md"


def write_page(file: Path, guide: Path = GUIDE) -> None:
    """Markdown beside the JSON, with what a person has to say (``.notes.md``); and the table in the guide."""
    results, notes = json.loads(file.read_text()), file.with_suffix(".notes.md")
    text = page(results)
    write_text(file.with_suffix(".md"), text + (f"\n{notes.read_text().strip()}\n" if notes.exists() else ""))
    content = guide.read_text()
    own = f"{BEGIN}\n\n{sizing(results)}\n\n{END}"
    write_text(guide, re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: own, content, flags=re.DOTALL))


def page(results: dict) -> str:
    about = results["about"]
    parts = [
        "# A cluster",
        f"Written by `python -m benchmarks.cluster`: {about['entries']:,} entries of {about['keys']}, the first "
        f"{about['tokens']:,} tokens of valid, {about['threads']} threads, Ray {about['ray']}. All actors are on this "
        "one machine and share its cores, so what is to be seen is the overhead.",
    ]
    for name, write in (("scoring", scoring), ("search", search), ("simulation", checks), ("simulation", growth)):
        if name in results:
            parts.append(write(results[name]))
    if "simulation" in results:
        parts += ["## Sizing", sizing(results)]
    return "\n\n".join(parts) + "\n"


def scoring(result: dict) -> str:
    base = result["local"]["tokens_per_second"]
    lines = [
        [_title(name), f"{run['tokens_per_second']:,.0f}", f"{base / run['tokens_per_second'] - 1:+.1%}",
         f"{run['model_seconds']:.1f}", f"{run['search_seconds']:.1f}", f"{run['perplexity']:.2f}"]
        for name, run in result.items()
    ]  # fmt: skip
    header = ["", "tokens/s", "more time", "model, s", "waiting for the search, s", "perplexity"]
    return "## Whole scoring\n\n" + table(header, lines, True, left=("",))


def search(result: dict) -> str:
    base, queries = result["local"]["seconds"], result["queries"]
    lines = []
    for name, run in result.items():
        if name == "queries":
            continue
        sent, back = (f"{run[way] / queries:,.0f}" if way in run else "" for way in ("sent", "received"))
        difference = f"{run['difference']:.1e}" if "difference" in run else ""
        lines.append(
            [_title(name), f"{run['seconds']:.2f}", f"{run['seconds'] / base - 1:+.1%}", sent, back, difference,
             f"{1000 * run['one_query_seconds']:.1f}"]
        )  # fmt: skip
    header = [
        "", "seconds", "more time", "bytes out per query", "bytes back", "largest difference of a log", "one query, ms",
    ]  # fmt: skip
    return f"## The search alone\n\n{queries:,} queries at once.\n\n" + table(header, lines, True, left=("",))


def checks(result: dict) -> str:
    lines = [
        [str(row["actors"]), f"{row['measured']:.2f}", f"{row['simulated']:.2f}",
         f"{row['simulated'] / row['measured'] - 1:+.0%}", f"{row['bytes_measured'] / 1e6:,.1f}",
         f"{row['bytes_simulated'] / 1e6:,.1f}"]
        for row in result["checks"]
    ]  # fmt: skip
    header = ["actors", "measured, s", "simulated, s", "error", "sent, MB", "simulated, MB"]
    return "## The simulation beside what was measured\n\n" + table(header, lines, True)


def growth(result: dict) -> str:
    gbit = result["network_bytes_per_second"] * 8 / 1e9
    lines = [
        [str(row["nodes"]), f"{row['queries_per_second']:,.0f}", f"{row['slowest_node']:.2f}",
         f"{row['slowest_node'] / row['mean_node']:.2f}", f"{row['driver']:.2f}", f"{row['network']:.2f}"]
        for row in result["growth"]
    ]  # fmt: skip
    header = ["nodes", "queries/s", "slowest node, s", "relative to the mean", "driver, s", "network, s"]
    return (
        f"## More nodes, simulated\n\nThe same queries and the same datastore; nodes like this machine, {gbit:g} "
        "Gbit/s out of the driver. The slowest of nodes, driver and network decides; the model is left out.\n\n"
        + table(header, lines, True)
    )


def sizing(results: dict) -> str:
    about, rows = results["about"], results["simulation"]["sizes"]
    gbit = results["simulation"]["network_bytes_per_second"] * 8 / 1e9
    lines = [
        [f"{row['entries'] / 1e6:,.0f} million", f"{row['bytes_per_entry']:,.0f}", str(row["nodes"]),
         f"{row['memory_per_node'] / 1e9:.1f} GB", f"{row['tokens_per_second']:,.0f}", row["limited_by"]]
        for row in rows
    ]  # fmt: skip
    header = ["entries", "bytes per entry", "nodes", "memory of each", "tokens/s", "limited by"]
    return (
        f"Keys of {about['keys']}, nodes of {NODE_MEMORY / 1e9:.0f} GB and {NODE_PROCESSORS} processors as fast as "
        f"those measured, {gbit:g} Gbit/s, {rows[0]['queries']:,} queries at once, nprobe {results['costs']['nprobe']}"
        "; simulated from measured costs, not run. The model's own time is left out: it is another limit.\n\n"
        + table(header, lines, True, left=("limited by",))
    )


def _title(name: str) -> str:
    return "local engine" if name == "local" else f"{name} actor{'s' if name != '1' else ''}"
