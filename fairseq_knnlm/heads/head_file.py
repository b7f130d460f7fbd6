"""A head on disk: ``head.json`` and ordinary ``.npy`` files.

    HEAD/head.json           kind, key, layer, where it comes from, how it was trained, checksums of the arrays
    HEAD/rows.npy            (rows, dim) float32: output embedding, or centroids
    HEAD/row_counts.npy      (vocabulary,) int32: rows of each word, in the order of the words
    HEAD/cluster_starts.npy, cluster_words.npy, cluster_counts.npy   instead of these for clusters
    HEAD/trunk.NAME.npy      the parameters of what comes before the rows
    HEAD/projection.npy      (dim, source dim) float32: from the model's states to keys, where keys are compact
"""

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import KnnlmError
from ..storage import file_sha256, from_record, publish_folder, read_versioned, write_array, write_record
from ..storage.arrays import map_array
from .clusters import ClusterWords
from .head import KINDS, Head
from .rows import RowLayout
from .trunks import make_trunk

FORMAT = "fairseq-knnlm head"
VERSION = 1
HEAD = "head.json"
REMEDY = "make it with knnlm learn"


@dataclass
class HeadFacts:
    """What head.json says."""

    kind: str  # embedding, mos, clusters or network
    key: str
    layer: int
    dim: int  # of the keys that it reads
    source_dim: int  # of the model's states
    vocabulary: int
    source: dict[str, Any]  # of the datastore: split, fingerprints of data, dictionary and checkpoint, context
    datastore_keys: str  # fingerprint of the datastore that it was learnt from
    entries: int  # of it
    rows: str  # --rows
    row_count: int
    metric: str
    temperature: float
    components: int = 0  # of a mixture of softmaxes
    depth: int = 0  # of a network
    training: dict[str, Any] = field(default_factory=dict)  # loss, seed, epochs, steps, learning rate, results, ...
    arrays: dict[str, Any] = field(default_factory=dict)  # name -> {shape, dtype, sha256}
    format: str = FORMAT
    version: int = VERSION

    @property
    def fingerprint(self) -> str:
        """Identifies what the head says."""
        checksums = "".join(f"{name}{facts['sha256']}" for name, facts in sorted(self.arrays.items()))
        return hashlib.sha256(f"{checksums}{self.metric}{self.temperature!r}".encode()).hexdigest()

    @property
    def bytes(self) -> int:
        """Of all arrays."""
        sizes = (np.prod(facts["shape"]) * np.dtype(facts["dtype"]).itemsize for facts in self.arrays.values())
        return int(sum(sizes))


def is_head_file(name: str) -> bool:
    """Whether a file of this name is one that learning wrote."""
    return name.endswith(".npy") or name in (HEAD, "progress.json", "tuned.json")


def head_arrays(head: Head) -> dict[str, np.ndarray]:
    """Everything that makes a head, by the names of its files."""
    arrays = {"rows": head.rows.detach().numpy()}
    if isinstance(head.words, ClusterWords):
        arrays["cluster_starts"] = head.words.starts.numpy()
        arrays["cluster_words"] = head.words.words.numpy().astype(np.int32)
        arrays["cluster_counts"] = head.words.counts.numpy().astype(np.int32)
    else:
        arrays["row_counts"] = head.words.counts.numpy().astype(np.int32)
    arrays |= {f"trunk.{name}": tensor.numpy() for name, tensor in head.trunk.state_dict().items()}
    if head.projection is not None:
        arrays["projection"] = head.projection.numpy()
    return arrays


def save_head(folder: str | Path, head: Head, facts: HeadFacts, work: Path | None = None) -> HeadFacts:
    """Write a head; it appears as a whole.

    Args:
        work: the folder in which it is put together, which then gets the head's name (default: one of its own)
    """
    folder = Path(folder)
    work = work or folder.with_name(folder.name + ".partial")
    work.mkdir(parents=True, exist_ok=True)
    facts.arrays = {}
    for name, array in head_arrays(head).items():
        sha256 = write_array(work / f"{name}.npy", array)
        facts.arrays[name] = {"shape": list(array.shape), "dtype": array.dtype.name, "sha256": sha256}
    write_record(work / HEAD, asdict(facts))
    for path in work.iterdir():  # what only training needed
        if path.name != HEAD and path.stem not in facts.arrays:
            path.unlink()
    publish_folder(work, folder, is_head_file)
    return facts


def read_head_facts(folder: str | Path) -> HeadFacts:
    """What head.json says."""
    folder = Path(folder)
    again = f"restore it from a copy, or delete {folder} and make it again with knnlm learn"
    content = read_versioned(folder / HEAD, FORMAT, VERSION, REMEDY)
    facts = from_record(HeadFacts, content, folder / HEAD, again)
    if facts.kind not in KINDS or facts.metric not in ("l2", "ip") or not facts.temperature > 0:
        raise KnnlmError(f"{folder / HEAD} is damaged (a head of kind {facts.kind}, metric {facts.metric}); {again}")
    for name, about in facts.arrays.items():
        is_whole = isinstance(about, dict) and {"shape", "dtype", "sha256"} <= set(about)
        if "/" in name or not is_whole or not isinstance(about["shape"], list):
            raise KnnlmError(f"{folder / HEAD} is damaged (of the array {name}); {again}")
    return facts


def open_head(folder: str | Path) -> tuple[Head, HeadFacts]:
    """A head and what is known about it; every array is compared with its checksum."""
    folder = Path(folder)
    again = f"restore it from a copy, or delete {folder} and make it again with knnlm learn"
    facts = read_head_facts(folder)
    arrays = {name: _read(folder, name, about, again) for name, about in facts.arrays.items()}
    try:
        head = _make_head(facts, arrays)
    except (KeyError, RuntimeError, IndexError, ValueError) as error:
        raise KnnlmError(f"{folder} is damaged (its arrays are not those of {facts.kind}); {again}") from error
    if len(head.rows) != facts.row_count or head.rows.size(1) != facts.dim or head.vocabulary != facts.vocabulary:
        raise KnnlmError(f"{folder} is damaged (its arrays have other sizes than {HEAD} says); {again}")
    return head, facts


def _read(folder: Path, name: str, about: Any, remedy: str) -> torch.Tensor:
    path = folder / f"{name}.npy"
    try:
        array = map_array(path, tuple(about["shape"]), about["dtype"], remedy)
    except TypeError as error:
        raise KnnlmError(f"{folder / HEAD} is damaged (of the array {name}); {remedy}") from error
    if file_sha256(path) != about["sha256"]:
        raise KnnlmError(f"{path} is damaged (its checksum differs); {remedy}")
    return torch.from_numpy(np.array(array))


def _make_head(facts: HeadFacts, arrays: dict[str, torch.Tensor]) -> Head:
    words: RowLayout | ClusterWords
    if facts.kind == "clusters":
        starts, of_cluster, counts = (arrays[f"cluster_{name}"] for name in ("starts", "words", "counts"))
        words = ClusterWords(starts, of_cluster, counts, facts.vocabulary)
    else:
        words = RowLayout(arrays["row_counts"])
    trunk = make_trunk(facts.kind, facts.dim, facts.components, facts.depth)
    state = {name.removeprefix("trunk."): array for name, array in arrays.items() if name.startswith("trunk.")}
    trunk.load_state_dict(state)
    for parameter in trunk.parameters():
        parameter.requires_grad_(False)
    return Head(arrays["rows"], words, facts.metric, facts.temperature, trunk.eval(), arrays.get("projection"))
