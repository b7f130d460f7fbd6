"""Adopt a FAISS index that another program built: find its files, check it against the keys, copy it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import faiss

from ..datastore.reader import Datastore
from ..errors import KnnlmError
from ..index.build import is_index_file
from ..index.checking import check_index
from ..index.faiss_io import head_bytes
from ..index.info import (
    IMPORTED,
    INDEX_FILE,
    INFO_FILE,
    IndexInfo,
    extract_ivf,
    find_index,
    index_folder,
    index_name,
    inverted_lists,
)
from ..storage import (
    Lock,
    OutputFile,
    check_disk_space,
    file_sha256,
    make_folder,
    publish_folder,
    recover_folder,
    write_record,
)
from ..storage.faults import read_failure
from ..storage.folders import clear_work_folder

COPY_BLOCK = 1 << 24
WITHOUT = "leave --index out and run knnlm build"


@dataclass(frozen=True)
class FoundIndex:
    """An open index, its file, and the file of its inverted lists if they are in one of their own."""

    index: faiss.Index
    path: Path
    lists: Path | None

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.path, self.lists) if path)


def find_index_files(path: Path) -> FoundIndex:
    """Open an index; its inverted lists may be in a file of their own (faiss.OnDiskInvertedLists)."""
    try:
        with open(path, "rb"):  # FAISS's own message for a file that it may not open reads like damage
            pass
    except OSError as error:
        raise read_failure(error, path) from error
    index = _read(path, faiss.IO_FLAG_MMAP_IFC)
    if index is not None and _lists_on_disk(index) is None:
        return FoundIndex(index, path, None)
    # FAISS opens the lists where they were when the index was written, and fails if they are gone from there.
    outline = _read(path, faiss.IO_FLAG_SKIP_IVF_DATA)
    on_disk = None if outline is None else _lists_on_disk(outline)
    if on_disk is None:
        raise KnnlmError(f"{path} is not a FAISS index; {WITHOUT}")
    return _open_with_lists(path, Path(on_disk.filename), on_disk.totsize)


def _open_with_lists(path: Path, stored: Path, size: int) -> FoundIndex:
    """Open an index with its inverted lists, which are beside it, or else where they were written."""
    beside = path.with_name(stored.name)
    lists = beside if beside.is_file() else stored
    if not lists.is_file():
        raise KnnlmError(
            f"{path} has its inverted lists in {stored.name}, which is missing; put that file beside it, or {WITHOUT}"
        )
    if lists.stat().st_size < size or lists.name in (INDEX_FILE, INFO_FILE):
        raise KnnlmError(f"{lists} does not hold the inverted lists of {path}; put the right file there, or {WITHOUT}")
    where = faiss.IO_FLAG_ONDISK_SAME_DIR if lists == beside else 0
    index = _read(path, faiss.IO_FLAG_READ_ONLY | where)
    if index is None:
        raise KnnlmError(f"{path} or {lists} is damaged; {WITHOUT}")
    return FoundIndex(index, path, lists)


def _read(path: Path, flags: int) -> faiss.Index | None:
    try:
        return faiss.read_index(str(path), flags)
    except (RuntimeError, MemoryError):
        return None


def _lists_on_disk(index: faiss.Index) -> faiss.OnDiskInvertedLists | None:
    ivf = extract_ivf(index)
    lists = None if ivf is None else faiss.downcast_InvertedLists(inverted_lists(ivf))
    return lists if isinstance(lists, faiss.OnDiskInvertedLists) else None


def adopt_index(datastore: Datastore, found: FoundIndex) -> str:
    """Copy an index that holds the keys of the datastore; what was done, for people to read."""
    metric = "ip" if found.index.metric_type == faiss.METRIC_INNER_PRODUCT else "l2"
    info = IndexInfo(
        index_name(IMPORTED, metric), IMPORTED, type(found.index).__name__, metric, len(datastore), datastore.dim,
        datastore.fingerprint,
    )  # fmt: skip
    folder = index_folder(datastore, info.name)
    make_folder(folder.parent)
    with Lock(folder.with_name(f"{info.name}.lock"), f"importing the index {info.name} of {datastore.folder}"):
        recover_folder(folder, _is_ours(found))
        if _is_there(datastore, info, found):
            return f"the index {info.name} is there already"
        if problem := check_index(datastore, found.index, info):
            raise KnnlmError(
                f"{found.path} is not an index of these keys ({problem}); the keys are in {datastore.folder}, so "
                f"{WITHOUT}"
            )
        _copy_index(found, info, folder)
    return f"the index {info.name} was adopted"


def _is_ours(found: FoundIndex) -> Callable[[str], bool]:
    """Tells whether a file in the index's folder may be removed."""
    return lambda name: is_index_file(name) or (found.lists is not None and name == found.lists.name)


def _is_there(datastore: Datastore, wanted: IndexInfo, found: FoundIndex) -> bool:
    """Whether this very index was adopted before, and has all its files."""
    present = find_index(datastore, wanted.name)
    if present is None or present.keys_fingerprint != wanted.keys_fingerprint:
        return False
    if present.lists_file:
        lists = index_folder(datastore, wanted.name) / present.lists_file
        if not lists.is_file() or lists.stat().st_size != present.lists_bytes:
            return False
    lists_sha256 = file_sha256(found.lists) if found.lists else None
    return (present.sha256, present.lists_sha256) == (file_sha256(found.path), lists_sha256)


def _copy_index(found: FoundIndex, info: IndexInfo, folder: Path) -> None:
    """Copy into a folder of another name, which then gets its own; the caller holds the lock."""
    work = folder.with_name(f"{info.name}.partial")
    make_folder(work)
    clear_work_folder(work, _is_ours(found))
    check_disk_space(work, found.bytes, f"the index {info.name}")
    size = found.path.stat().st_size
    info = replace(info, sha256=_copy(found.path, work / INDEX_FILE), bytes=size)
    # Without the lists the whole file is structure.
    info.head_bytes = size if found.lists else head_bytes(found.index, size)
    info.head_sha256 = file_sha256(work / INDEX_FILE, info.head_bytes)
    if found.lists:
        info.lists_file, info.lists_bytes = found.lists.name, found.lists.stat().st_size
        info.lists_sha256 = _copy(found.lists, work / found.lists.name)
    write_record(work / INFO_FILE, asdict(info))
    publish_folder(work, folder, _is_ours(found))


def _copy(source: Path, target: Path) -> str:
    """Copy a file; its SHA-256."""
    try:
        with open(source, "rb") as file, OutputFile(target) as output:
            while block := file.read(COPY_BLOCK):
                output.write(block)
            return output.commit()
    except OSError as error:
        raise read_failure(error, source) from error
