"""Building the default index, of full and of compact keys, and the original's: how long, how much memory."""

import os
import shutil
from pathlib import Path

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.index import list_indexes

from .command import run, warm
from .setting import Setting


def measure(setting: Setting) -> dict:
    """For each index: seconds, peak memory of the command, bytes of the index."""
    store, compact = setting.open_datastore(), setting.open_compact()
    folder = setting.work / "build"
    return {
        "entries": len(store),
        "indexes": {
            "auto": _measure_index(store, "auto", folder),
            "paper": _measure_index(store, "paper", folder),
            f"auto, {compact.dim} x int8": _measure_index(compact, "auto", folder),
        },
    }


def _measure_index(store: Datastore, name: str, folder: Path) -> dict:
    """Build in a folder that is the same datastore without its indexes. One that the datastore lacks is kept there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in store.folder.glob("*.*"):
        os.symlink(file.resolve(), folder / file.name)
    warm(*sorted(store.folder.glob("keys-*.npy")))
    measured = run("knnlm", "build", folder, "--index", name)
    info = next(info for info in list_indexes(Datastore(folder)) if info.name == name)
    kept = store.folder / "index" / name
    if not kept.exists():  # other parts need it, and it takes long
        kept.parent.mkdir(exist_ok=True)
        (folder / "index" / name).rename(kept)
    shutil.rmtree(folder)
    return {
        "factory": info.factory or "none",
        "seconds": info.seconds,
        "peak_memory": measured["peak_memory"],
        "bytes": info.bytes,
    }


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
