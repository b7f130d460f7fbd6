"""What a table of neighbours costs, which SPALM is trained with: processor time for a million tokens."""

import resource
import shutil

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.index import build_index_if_missing, index_file

from .command import run, warm
from .setting import Setting

# Yogatama et al. 2021: hours on so many processors for so many tokens.
PAPER_HOURS, PAPER_PROCESSORS, PAPER_MILLIONS = (6, 8), 1000, 110


def measure(setting: Setting) -> dict:
    """knnlm neighbors with its defaults, for all tokens of valid."""
    store, folder = setting.open_datastore(), setting.work / "table"
    setting.eval_lm("--knn-dump", setting.work / "valid")
    warm(index_file(store, build_index_if_missing(store, "auto", "l2").name))
    shutil.rmtree(folder, ignore_errors=True)
    before = _processor_seconds()
    row = run("knnlm", "neighbors", "--datastore", store.folder, "--queries", setting.work / "valid", "-o", folder)
    spent = _processor_seconds() - before
    queries = len(Datastore(setting.work / "valid"))
    return {
        "entries": len(store), "dim": store.dim, "queries": queries, "seconds": row["seconds"],
        "processor_seconds": spent, "processor_seconds_per_million": 1e6 * spent / queries,
        "command": setting.anywhere(row["command"]),
    }  # fmt: skip


def _processor_seconds() -> float:
    """Of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def table(result: dict) -> tuple[list[str], list[list[str]]]:
    paper = [f"{3600 * hours * PAPER_PROCESSORS / PAPER_MILLIONS:,.0f}" for hours in PAPER_HOURS]
    hours = " to ".join(map(str, PAPER_HOURS))
    return ["", "processor seconds for a million tokens"], [
        [f"knnlm neighbors, {result['entries']:,} entries of {result['dim']} dimensions",
         f"{result['processor_seconds_per_million']:,.0f}"],
        [f"Yogatama et al. 2021: {hours} hours on {PAPER_PROCESSORS:,} processors for {PAPER_MILLIONS} million tokens",
         " to ".join(paper)],
    ]  # fmt: skip
