"""Is a datastore what its manifest says? Checksums, row counts, values inside the dictionary."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import KnnlmError
from ..storage import file_sha256, is_intact
from .manifest import MANIFEST
from .reader import Datastore
from .tuned import TUNED, read_tuned


@dataclass
class Check:
    """One thing that was looked at."""

    what: str
    problem: str = ""  # empty: all is well


def check_record(path: Path) -> Check:
    """Whether the JSON that describes a folder is as it was written."""
    problem = "" if is_intact(path) else "it was edited or damaged after it was written; restore it from a copy"
    return Check(path.name, problem)


def check_file(path: Path, sha256: str, remedy: str) -> Check:
    """Whether a file has the checksum that it was written with."""
    try:
        return Check(path.name, "" if file_sha256(path) == sha256 else f"the checksum differs; {remedy}")
    except KnnlmError as error:
        return Check(path.name, str(error))


def _check_tuned(datastore: Datastore) -> Check:
    try:
        read_tuned(datastore.folder, datastore.fingerprint)
        return check_record(datastore.folder / TUNED)
    except KnnlmError as error:
        return Check(TUNED, str(error))


def verify_datastore(datastore: Datastore) -> Iterator[Check]:
    """Every check of the datastore itself, as it is done. Opening it has compared shapes and dtypes already."""
    yield Check("files and row counts")
    yield check_record(datastore.folder / MANIFEST)
    if (datastore.folder / TUNED).exists():
        yield _check_tuned(datastore)
    for name, damaged in datastore.damaged_files():
        yield Check(name, "the checksum differs; restore it from a copy or dump again" if damaged else "")
    try:
        yield Check(f"values ({len(datastore.values):,} tokens of the dictionary)")
    except KnnlmError as error:
        yield Check("values", str(error))
    if datastore.is_weighted:
        try:
            weights = datastore.weights
            assert weights is not None
            yield Check(f"weights ({weights.min():.4g} to {weights.max():.4g})")
        except KnnlmError as error:
            yield Check("weights", str(error))
