"""Building the default index and the original's: how long, how much memory."""

import os
import shutil
from pathlib import Path

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.index import list_indexes

from .command import run, warm
from .setting import Setting


def measure(setting: Setting) -> dict:
    """For each index: seconds, peak memory of the command, bytes of the index."""
    store = setting.open_datastore()
    folder = setting.work / "build"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in Path(setting.datastore).glob("*.*"):  # the same datastore without its indexes
        os.symlink(file.resolve(), folder / file.name)
    results = {}
    for name in ("auto", "paper"):
        warm(*sorted(Path(setting.datastore).glob("keys-*.npy")))
        measured = run("knnlm", "build", folder, "--index", name)
        info = next(info for info in list_indexes(Datastore(folder)) if info.name == name)
        results[name] = {
            "factory": info.factory or "none",
            "seconds": info.seconds,
            "peak_memory": measured["peak_memory"],
            "bytes": info.bytes,
        }
        shutil.rmtree(folder / "index")
    shutil.rmtree(folder)
    return {"entries": len(store), "indexes": results}


def table(result: dict) -> tuple[list[str], list[list[str]]]:
    original = result["indexes"]["paper"]["seconds"]
    lines = [
        [
            f"{name}: {row['factory']}", f"{row['seconds']:.0f} s", f"{row['seconds'] / original:.2f}",
            f"{row['bytes'] / 1e9:.2f} GB", f"{row['peak_memory'] / 1e9:.2f} GB",
        ]
        for name, row in result["indexes"].items()
    ]  # fmt: skip
    return ["", "build", "x original", "index", "peak memory"], lines
