"""The actor: the owner of a range of lists on one node, who answers what ``ListVisitor`` answers."""

import os
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..datastore import Datastore
from ..errors import KnnlmError
from ..index.info import INDEX_FILE, IndexInfo, find_index, index_folder, open_index
from ..index.list_files import open_lists
from ..progress import Style
from ..search.list_blocks import FileLists, Lists, ResidentLists
from ..search.list_visitor import ListVisitor
from ..search.masses import Masses
from ..search.one_query import OneQueryScan
from ..search.visitor import Found, VisitedMasses
from ..storage import file_sha256, read_ahead
from .node_facts import own_copy


@dataclass
class Assignment:
    """What an actor has to open."""

    folder: str  # of the datastore, as the driver calls it
    keys: str  # the fingerprint of its keys
    index: dict[str, Any]  # the whole record of the index, with its checksums
    first: int  # its own lists, up to ``stop`` and without it
    stop: int
    metric: str
    holds_keys: bool  # whether the codes of the lists are the keys
    threads: int
    processors: list[int] | None  # to be pinned to
    device: str
    half: bool  # products of half precision


class ListActor:
    """Opens its node's copy of a datastore, and keeps to its own lists."""

    def __init__(self) -> None:
        self._visitor: ListVisitor | None = None

    def open(self, task: Assignment) -> int:
        """Open the lists; the process of this actor."""
        # What comes through Ray's object store cannot be written to, which nothing here does.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        Style.chosen = "none"
        if task.processors:
            os.sched_setaffinity(0, task.processors)  # threads that are started later take that over
        torch.set_num_threads(task.threads)
        datastore = Datastore(own_copy(task.folder))
        info = self._check(datastore, task)
        lists = open_lists(datastore, info)
        if lists is None:
            raise KnnlmError(f"the index {info.name} of {datastore.folder} has no lists that this release wrote")
        device = torch.device(task.device)
        files, scan = FileLists(lists, datastore, task.holds_keys), None
        source: Lists = files
        if device.type != "cpu" and task.holds_keys:
            source = ResidentLists(files, device, task.first, task.stop)
        else:
            if task.holds_keys:  # the same scan of one query as on one machine, so that the digits are the same
                scan = OneQueryScan(open_index(datastore, info, warm=False), files, task.metric)
            begin = lists.file.offset(task.first)
            read_ahead(lists.file.path, begin, lists.file.offset(task.stop) - begin)
        precision = torch.float16 if task.half else torch.float32
        means = lists.means if task.holds_keys else None
        own = (task.first, task.stop)
        self._visitor = ListVisitor(source, datastore, task.metric, device, means, precision, own, scan)
        return os.getpid()

    def _check(self, datastore: Datastore, task: Assignment) -> IndexInfo:
        """Refuse a copy that is not what the driver has."""
        info = find_index(datastore, task.index["name"])
        remedy = "copy the datastore to this node again"
        if info is None:
            raise KnnlmError(f"{datastore.folder} has no whole index {task.index['name']}; {remedy}")
        if datastore.fingerprint != task.keys or asdict(info) != task.index:
            raise KnnlmError(f"{datastore.folder} differs from the driver's (its checksums); {remedy}")
        path = index_folder(datastore, info.name) / INDEX_FILE
        if file_sha256(path, info.head_bytes) != info.head_sha256:
            raise KnnlmError(f"{path} is damaged (its checksum differs); {remedy}")
        return info

    @property
    def _own(self) -> ListVisitor:
        if self._visitor is None:
            raise RuntimeError("the actor was asked before it was opened")
        return self._visitor

    def answer(self, method: str, question: tuple[np.ndarray, np.ndarray], *options: Any) -> Any:
        """Answer one of the questions below, about queries (r, dim) and the lists that each visits (r, m)."""
        return getattr(self, method)(*question, *options)

    def masses(self, vectors: np.ndarray, near: np.ndarray, targets: np.ndarray, *options: Any) -> Masses:
        return self._own.masses(self._tensor(vectors), targets, near, *options)

    def nearest(self, vectors: np.ndarray, near: np.ndarray, *options: Any) -> Found:
        distances, ids, right = zip(*self._own.nearest(self._tensor(vectors), near, *options))
        return np.concatenate(distances), np.concatenate(ids), np.concatenate(right)

    def nearest_plainly(self, vectors: np.ndarray, near: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        return self._own.nearest_plainly(self._tensor(vectors), near, k)

    def visited(self, vectors: np.ndarray, near: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._own.visited(self._tensor(vectors), near)

    def visited_masses(self, vectors: np.ndarray, near: np.ndarray, scale: float) -> VisitedMasses:
        """As ``ListVisitor.visited_masses``, each value once: entries are many, and nobody asks for a single one."""
        values, masses, totals = self._own.visited_masses(self._tensor(vectors), near, scale)
        if not len(values):
            return values, masses, totals
        order = np.argsort(values, kind="stable")
        begins = np.flatnonzero(np.diff(values[order], prepend=-1))
        return values[order][begins], np.logaddexp.reduceat(masses[order], begins), totals

    def _tensor(self, vectors: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(vectors)).to(self._own.device)
