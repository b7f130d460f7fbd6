"""What a method found out about every entry, kept in the datastore: any number of entries can be kept by it.

    DIR/pruning/<method>-<digest>/scores.json     the method and its settings, checksums
    DIR/pruning/<method>-<digest>/*.npy (entries,) one or two numbers of each entry
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..datastore import Datastore
from ..errors import KnnlmError
from ..storage import (
    Lock,
    file_sha256,
    from_record,
    make_folder,
    publish_folder,
    read_versioned,
    write_array,
    write_record,
)
from ..storage.arrays import map_array
from ..storage.folders import clear_work_folder

FORMAT = "fairseq-knnlm entry-scores"
VERSION = 1
FACTS = "scores.json"
FOLDER = "pruning"
Arrays = dict[str, np.ndarray]


@dataclass
class ScoreFacts:
    """What scores.json says."""

    settings: dict[str, Any]  # method and options, the keys and the index that it looked at
    sha256: dict[str, str]  # of each array's file
    dtypes: dict[str, str]
    format: str = FORMAT
    version: int = VERSION


def is_score_file(name: str) -> bool:
    """Whether a file of this name in such a folder was written by us."""
    return name == FACTS or name.endswith(".npy")


def kept_scores(datastore: Datastore, settings: dict[str, Any], compute: Callable[[], Arrays]) -> Arrays:
    """The arrays that these settings give, from the folder of the datastore or computed and put there.

    They appear when they are whole; another process that wants the same waits for them.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    folder = datastore.folder / FOLDER / f"{settings['method']}-{digest}"
    make_folder(folder.parent)
    with Lock(folder.with_name(f"{folder.name}.lock"), f"scoring the entries of {datastore.folder}"):
        if (folder / FACTS).exists():
            return _read(folder, len(datastore), settings)
        arrays = compute()
        work = folder.with_name(f"{folder.name}.partial")
        make_folder(work)
        clear_work_folder(work, is_score_file)
        checksums = {name: write_array(work / f"{name}.npy", array) for name, array in arrays.items()}
        dtypes = {name: str(array.dtype) for name, array in arrays.items()}
        write_record(work / FACTS, asdict(ScoreFacts(settings, checksums, dtypes)))
        publish_folder(work, folder, is_score_file)
        return arrays


def _read(folder: Path, entries: int, settings: dict[str, Any]) -> Arrays:
    remedy = f"delete {folder} and run knnlm prune again"
    content = read_versioned(folder / FACTS, FORMAT, VERSION, remedy)
    facts = from_record(ScoreFacts, content, folder / FACTS, remedy)
    if facts.settings != settings:
        raise KnnlmError(f"{folder / FACTS} is damaged (it is of other settings); {remedy}")
    arrays = {}
    for name, dtype in facts.dtypes.items():
        path = folder / f"{name}.npy"
        arrays[name] = np.array(map_array(path, (entries,), dtype, remedy))
        if file_sha256(path) != facts.sha256.get(name):
            raise KnnlmError(f"{path} is damaged (its checksum differs); {remedy}")
    return arrays
