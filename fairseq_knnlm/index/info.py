"""What is known about the indexes of a datastore, and opening them.

To describe an index takes no FAISS, so the functions that need it import it themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datastore import Datastore
from ..datastore.key_codec import CODES, KeyCodec
from ..errors import KnnlmError
from ..machine import available_memory
from ..storage import file_sha256, from_record, human_bytes, read_ahead
from ..storage.faults import read_failure
from ..storage.records import read_record

if TYPE_CHECKING:
    import faiss

INDEX_FILE = "index.faiss"
INFO_FILE = "index.json"
IMPORTED = "imported"  # the spec of an index that another program built
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
WORK_SUFFIXES = (".partial", ".lock")


@dataclass
class IndexInfo:
    """What index.json says."""

    name: str
    spec: str  # as asked for
    factory: str | None  # as given to FAISS; None: no index file, the stored keys are searched
    metric: str
    entries: int
    dim: int
    keys_fingerprint: str
    sha256: str | None = None
    bytes: int = 0
    seconds: float = 0.0
    # FAISS trusts what it reads, so everything before the inverted lists is checked before it is read.
    head_bytes: int = 0
    head_sha256: str | None = None
    lists_file: str | None = None  # inverted lists in a file of their own (faiss.OnDiskInvertedLists)
    lists_sha256: str | None = None
    lists_bytes: int = 0
    # Where we wrote the lists ourselves: how many, the size of a code, and the checksums of the files beside them.
    lists: int = 0
    code_bytes: int = 0
    files: dict[str, str] | None = None
    # Where neighbours are spread as at a good temperature: see ``temperature``. None: not measured.
    temperature: float | None = None


def index_name(spec: str, metric: str) -> str:
    """The folder of a spec: its own name, made safe, and the metric unless it is the usual one."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", spec)
    return name if metric == "l2" else f"{name}-{metric}"


def check_name(name: str) -> None:
    """A name becomes a folder, so it must not lead anywhere else."""
    if not PLAIN_NAME.fullmatch(name) or name.endswith(WORK_SUFFIXES) or ".old-" in name:
        raise KnnlmError(
            f"'{name}' cannot be the name of an index; use letters, digits, '_', '-' and '.', beginning with a letter, "
            "a digit or '_'"
        )


def index_folder(datastore: Datastore, name: str) -> Path:
    return datastore.folder / "index" / name


def index_file(datastore: Datastore, name: str) -> Path:
    """Where the FAISS index of this name is."""
    return index_folder(datastore, name) / INDEX_FILE


def list_indexes(datastore: Datastore) -> list[IndexInfo]:
    """The finished indexes, by name."""
    paths = sorted((datastore.folder / "index").glob(f"*/{INFO_FILE}"))
    return [read_info(path) for path in paths if not path.parent.name.endswith(WORK_SUFFIXES) and _is_plain(path)]


def _is_plain(path: Path) -> bool:
    return ".old-" not in path.parent.name


def read_info(path: Path) -> IndexInfo:
    remedy = f"delete {path.parent} and run knnlm build again"
    info = from_record(IndexInfo, read_record(path, remedy), path, remedy)
    if info.metric not in ("l2", "ip") or info.name != path.parent.name.removesuffix(".partial"):
        raise KnnlmError(f"{path} is damaged (index {info.name}, metric {info.metric}); {remedy}")
    return info


def describe_index(info: IndexInfo) -> str:
    """Its name, its kind and its size, in a few words."""
    size = f", {human_bytes(info.bytes)}, built in {info.seconds:.0f}s" if info.factory else ""
    return f"{info.name}: {info.factory or 'flat'}, {info.metric}{size}"


def find_index(datastore: Datastore, name: str) -> IndexInfo | None:
    """The finished index of this name, if its file is there, too."""
    path = index_folder(datastore, name) / INFO_FILE
    if not path.exists():
        return None
    info = read_info(path)
    file = index_file(datastore, name)
    files = [] if info.factory is None else [(file, info.bytes), *_lists(file, info)]
    return info if all(path.exists() and path.stat().st_size == size for path, size in files) else None


def remedy_for(datastore: Datastore, info: IndexInfo) -> str:
    """The command that builds a lost or damaged index again."""
    if datastore.manifest.keys_in_index == info.name:
        return "restore it from a copy, for it holds the only copy of the keys; without one, dump them again"
    if info.spec == IMPORTED:
        folder = index_folder(datastore, info.name)
        return f"run knnlm import with --index again, or delete {folder} and run knnlm build {datastore.folder}"
    name = "" if info.name == index_name(info.spec, info.metric) else f" --name {info.name}"
    metric = "" if info.metric == "l2" else f" --metric {info.metric}"
    return f"run knnlm build {datastore.folder} --index '{info.spec}'{name}{metric} --force"


def open_index(datastore: Datastore, info: IndexInfo, warm: bool = True) -> faiss.Index | None:
    """The FAISS index, memory-mapped where FAISS can, or None for ``flat``.

    Args:
        warm: let the system read it all into its cache, if that is large enough
    """
    if info.factory is None:
        return None
    path, remedy = index_file(datastore, info.name), remedy_for(datastore, info)
    for file, size in ((path, info.bytes), *_lists(path, info)):
        if not file.exists():
            raise KnnlmError(f"{file} is missing; {remedy}")
        if file.stat().st_size != size:
            raise KnnlmError(f"{file} has {file.stat().st_size:,} bytes instead of {size:,}; {remedy}")
    if info.head_sha256 and file_sha256(path, info.head_bytes) != info.head_sha256:
        raise KnnlmError(f"{path} is damaged (its checksum differs); {remedy}")
    if warm and info.bytes + info.lists_bytes < available_memory():
        for file, _ in ((path, info.bytes), *_lists(path, info)):
            read_ahead(file)
    index = read_faiss(path, remedy, lists_on_disk=info.lists_file is not None)
    if index.ntotal != len(datastore) or index.d != datastore.dim:
        raise KnnlmError(
            f"{path} holds {index.ntotal:,} keys of dimension {index.d} but {datastore.folder} has "
            f"{len(datastore):,} of {datastore.dim}; {remedy}"
        )
    return index


def _lists(path: Path, info: IndexInfo) -> list[tuple[Path, int]]:
    return [(path.parent / Path(info.lists_file).name, info.lists_bytes)] if info.lists_file else []


def read_faiss(path: Path, remedy: str, lists_on_disk: bool = False) -> faiss.Index:
    """Read an index file; its inverted lists stay on the disk where FAISS can map them.

    Args:
        lists_on_disk: whether they are in a file of their own, beside this one
    """
    import faiss

    on_disk = faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR
    try:
        with open(path, "rb"):  # FAISS's own message for a file that it may not open reads like damage
            return faiss.read_index(str(path), on_disk if lists_on_disk else faiss.IO_FLAG_MMAP_IFC)
    except OSError as error:
        raise read_failure(error, path) from error
    except (RuntimeError, MemoryError) as error:
        raise KnnlmError(f"{path} is damaged ({last_line(error)}); {remedy}") from error


def last_line(error: Exception) -> str:
    """FAISS's messages begin with the place in its source."""
    lines = str(error).strip().splitlines()
    return lines[-1].split("Error: ")[-1] if lines else type(error).__name__


def faiss_metric(metric: str) -> int:
    import faiss

    return faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2


def extract_ivf(index: faiss.Index) -> faiss.IndexIVF | None:
    """The IVF index inside (behind PCA, OPQ), as its own class, or None. FAISS itself returns the base class."""
    import faiss

    ivf = faiss.try_extract_index_ivf(index)
    own = None if ivf is None else faiss.downcast_index(ivf)
    assert own is None or isinstance(own, faiss.IndexIVF)
    return own


def inverted_lists(ivf: faiss.IndexIVF) -> faiss.InvertedLists:
    """The lists of an index, which all have that we build; one of another program may be without."""
    lists = ivf.invlists
    if lists is None:
        raise KnnlmError(f"this {type(ivf).__name__} was written without its inverted lists; build another index")
    return lists


def split_transform(index: faiss.Index) -> tuple[Callable[[np.ndarray], np.ndarray], faiss.IndexIVF | None]:
    """What is applied to vectors before the coarse quantizer (PCA, OPQ), and the IVF index itself."""
    import faiss

    steps = []
    if isinstance(index, faiss.IndexPreTransform):
        chain: Any = index.chain  # a std::vector, not the list that FAISS's types say
        steps = [faiss.downcast_VectorTransform(chain.at(i)) for i in range(chain.size())]

    def transform(vectors: np.ndarray) -> np.ndarray:
        vectors = np.ascontiguousarray(vectors, np.float32)
        for step in steps:
            vectors = step.apply(vectors)
        return vectors

    return transform, extract_ivf(index)


def bare_ivf(index: faiss.Index) -> faiss.IndexIVF | None:
    """The index itself, if its coarse quantizer sees the keys as they are (no PCA before, no refinement after)."""
    import faiss

    return None if isinstance(index, faiss.IndexPreTransform | faiss.IndexRefine) else extract_ivf(index)


def has_flat_quantizer(ivf: faiss.IndexIVF | None) -> bool:
    """Whether the coarse quantizer is a plain list of centroids (no graph, no lists over them)."""
    import faiss

    return ivf is not None and isinstance(faiss.downcast_index(ivf.quantizer), faiss.IndexFlat)


def quantizer_ivf(ivf: faiss.IndexIVF | None) -> faiss.IndexIVF | None:
    """The IVF index over the centroids, as in ``IVF16384(IVF128,Flat),...``, if there is one."""
    import faiss

    quantizer = None if ivf is None else faiss.downcast_index(ivf.quantizer)
    return quantizer if isinstance(quantizer, faiss.IndexIVF) else None


def stores_exact_keys(index: faiss.Index, datastore: Datastore) -> bool:
    """Whether the index holds the keys themselves, so that its distances are exact."""
    import faiss

    ivf = faiss.downcast_index(index)
    if isinstance(ivf, faiss.IndexIVFFlat):
        return ivf.d == datastore.dim
    if not isinstance(ivf, faiss.IndexIVFScalarQuantizer) or ivf.by_residual or ivf.d != datastore.dim:
        return False
    dtype = datastore.manifest.key_dtype
    if ivf.sq.qtype == faiss.ScalarQuantizer.QT_8bit and dtype == "int8":
        ranges = faiss.vector_to_array(ivf.sq.trained)
        return bool(np.array_equal(ranges, faiss_ranges(datastore.codec)))
    return ivf.sq.qtype == faiss.ScalarQuantizer.QT_fp16 and dtype == "float16"


def faiss_ranges(codec: KeyCodec) -> np.ndarray:
    """Lowest number and width of each dimension's range, as FAISS has them: (2 dim,).

    FAISS stores u = 0 ... 255 for lowest + width (u + 0.5) / 255, and we c = u - 128 for centre + step c.
    """
    assert codec.centre is not None and codec.step is not None
    lowest = codec.centre - (CODES / 2 + 0.5) * codec.step
    return np.concatenate([lowest, (CODES - 1) * codec.step]).astype(np.float32)
