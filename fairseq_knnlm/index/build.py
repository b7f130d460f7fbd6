"""Building an index: train, find the list of every key, add, and let it appear only when it is whole."""

import logging
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from ..datastore import Datastore
from ..errors import KnnlmError, resumable
from ..progress import progress
from ..storage import (
    Lock,
    check_disk_space,
    file_sha256,
    human_bytes,
    make_folder,
    publish_folder,
    read_json,
    recover_folder,
    remove_stale_files,
    write_json,
    write_record,
)
from ..storage.folders import clear_work_folder
from .assign import FoundLists, find_lists
from .faiss_io import head_bytes, write_faiss
from .info import (
    IMPORTED,
    INDEX_FILE,
    INFO_FILE,
    IndexInfo,
    bare_ivf,
    check_name,
    extract_ivf,
    find_index,
    index_folder,
    index_name,
    list_indexes,
    quantizer_ivf,
    read_info,
    remedy_for,
)
from .list_files import ALL_FILES, checksums
from .list_writer import PARTITION, PARTITIONED, WRITING, WRITTEN, ListWriter
from .plan import GROUPS_FOR_ADDING, IndexPlan, estimate_time, plan_index
from .temperature import measure_temperature
from .training import SAMPLE, train_index

logger = logging.getLogger(__name__)

GROUPS_FOR_SEARCHING = 8
FILLED_BY_FAISS = (faiss.IndexIVFFastScan, faiss.IndexIVFPQR)  # in ways of its own
ADD_BLOCK = 1 << 16
CHECKPOINT_SECONDS = 300
BUILD_VERSION = 6  # of the steps below: a build that an older release began is not continued

# What a build writes; nothing else is ever removed.
BUILD_RECORD, TRAINED, ADDED, LISTS = "build.json", "trained.faiss", "added.faiss", "lists.int32"
OF_OLD_RELEASES = "clusters"
AFTER_TRAINING = (ADDED, LISTS, PARTITION, PARTITIONED, WRITING, WRITTEN)
LEFTOVERS = (BUILD_RECORD, TRAINED, *AFTER_TRAINING, SAMPLE, OF_OLD_RELEASES)

# What stands beside each piece of the lists; and what the nodes of a cluster write, see ``cluster.list_building``.
PIECES = re.compile(r"(part|piece)-\d{5}[.-][a-z_]+(\.npy)?")

# (datastore, trained index, metric, work folder, checksum of the trained index) -> SHA-256 of INDEX_FILE, bytes of its
# head; writes INDEX_FILE and what stands beside it.
WriteLists = Callable[[Datastore, faiss.IndexIVF, str, Path, str], tuple[str, int]]


def is_index_file(name: str) -> bool:
    """Whether a file of this name in an index's folder was written by us."""
    ours = name in (INDEX_FILE, INFO_FILE, *ALL_FILES, *LEFTOVERS) or name.endswith(".ivfdata")
    return ours or PIECES.fullmatch(name) is not None


def build_index(
    datastore: Datastore,
    spec: str,
    metric: str,
    name: str | None = None,
    seed: int = 1,
    force: bool = False,
    device: torch.device | str = "cpu",
    write_lists: WriteLists | None = None,
) -> IndexInfo:
    """Build an index, or finish one that was interrupted; it appears under its name only when it is whole.

    One process builds; others that ask for the same index wait for it, and then use it.

    Args:
        force: build again what is there already
        device: where centroids, and the list of every key, are found
        write_lists: who finds the list of every key and writes the lists; None: this process
    """
    if name is None:
        plan_index(spec, len(datastore), datastore.dim, datastore.manifest.key_dtype, metric)  # a spec that makes sense
        name = index_name(spec, metric)
    check_name(name)
    folder = index_folder(datastore, name)
    make_folder(folder.parent)
    with Lock(folder.with_name(f"{name}.lock"), f"building the index {name} of {datastore.folder}"):
        recover_folder(folder, is_index_file)
        present = find_index(datastore, name)
        asked = (spec, metric, datastore.fingerprint)
        if present and force and datastore.manifest.keys_in_index == name:
            raise KnnlmError(f"the index {name} holds the only copy of the keys; build another one, with --name")
        if not force and present and (present.spec, present.metric, present.keys_fingerprint) == asked:
            return present
        with resumable(f"run the same command again, or knnlm build {datastore.folder}: it continues where it stopped"):
            return _Build(datastore, spec, metric, name, seed, device, write_lists).run()


def build_index_if_missing(
    datastore: Datastore, spec: str | None, metric: str, device: torch.device | str = "cpu"
) -> IndexInfo:
    """The index of this spec; without one the only index of this metric, or else ``auto``. Built when missing."""
    everything = list_indexes(datastore)
    present = [info for info in everything if info.metric == metric]
    if spec is None:
        automatic = [info for info in present if info.name == index_name("auto", metric)]
        chosen = automatic or (present if len(present) == 1 else [])
        spec = "auto"
    else:
        chosen = [info for info in present if info.name in (spec, index_name(spec, metric))]
        # A preset or factory string can be built for either metric; a name of one's own, or "imported", cannot.
        other = [info for info in everything if info.name == spec and (info.spec != spec or spec == IMPORTED)]
        if other and not chosen:
            raise KnnlmError(
                f"the index {spec} of {datastore.folder} is for the metric {other[0].metric}; use --knn-metric "
                f"{other[0].metric}, or another --knn-index"
            )
    if not chosen:
        return build_index(datastore, spec, metric, device=device)
    info = chosen[0]
    if info.keys_fingerprint == datastore.fingerprint:
        return info
    if info.spec == IMPORTED:
        raise KnnlmError(
            f"the index {info.name} was built from other keys than {datastore.folder} has now; "
            f"{remedy_for(datastore, info)}"
        )
    logger.warning(f"index {info.name} was built from other keys than {datastore.folder} has now; rebuilding")
    return build_index(datastore, info.spec, metric, info.name, device=device)


class _Build:
    """One build of one index; the caller holds the lock of its name."""

    def __init__(
        self, datastore: Datastore, spec: str, metric: str, name: str, seed: int, device: torch.device | str,
        write_lists: WriteLists | None = None,
    ):  # fmt: skip
        self._write_elsewhere = write_lists
        self.datastore, self.metric, self.seed, self.device = datastore, metric, seed, device
        self.folder = index_folder(datastore, name)
        self.work = self.folder.with_name(f"{name}.partial")
        self.info = IndexInfo(name, spec, None, metric, len(datastore), datastore.dim, datastore.fingerprint)
        self._record: dict[str, Any] = {}

    def run(self) -> IndexInfo:
        started = time.perf_counter()
        plan = self._open_work_folder()
        self.info.factory = plan.factory
        if finished := self._finished():
            self.info = finished
        else:
            logger.info(f"index {self.info.name}: {plan.factory or 'flat'} ({plan.why})")
            if plan.factory:
                self._build(plan)
            self.info.temperature = measure_temperature(self.datastore, self.metric)
            self.info.seconds = round(time.perf_counter() - started, 1)
            write_record(self.work / INFO_FILE, asdict(self.info))
        # From here on the index is whole: a process that is killed now finds it so the next time.
        for name in [*LEFTOVERS, *(path.name for path in self.work.iterdir() if PIECES.fullmatch(path.name))]:
            (self.work / name).unlink(missing_ok=True)
        publish_folder(self.work, self.folder, is_index_file)
        logger.info(f"index {self.info.name} is ready: {human_bytes(self.info.bytes)}, {self.info.seconds:.0f}s")
        return self.info

    def _open_work_folder(self) -> IndexPlan:
        """Continue an interrupted build of the same index, by its own plan; or begin a new one."""
        make_folder(self.work)
        remove_stale_files(self.work)
        same = {
            "spec": self.info.spec, "metric": self.metric, "keys": self.info.keys_fingerprint, "seed": self.seed,
            "version": BUILD_VERSION,
        }  # fmt: skip
        path = self.work / BUILD_RECORD
        record = read_json(path, f"delete {self.work} and build again") if path.exists() else {}
        if {name: record.get(name) for name in same} == same:
            # The plan may depend on the memory that is free, so another one now would throw away what is done.
            self._record = record
            return IndexPlan(**record["plan"])
        dim, dtype = self.datastore.dim, self.datastore.manifest.key_dtype
        plan = plan_index(self.info.spec, len(self.datastore), dim, dtype, self.metric)
        if not self._finished():  # which may have lost its record already
            clear_work_folder(self.work, is_index_file)
            self._record = {**same, "plan": asdict(plan), "files": {}}
            write_json(path, self._record)
        return plan

    def _finished(self) -> IndexInfo | None:
        """What a process left that was killed between its last byte and the final rename."""
        path = self.work / INFO_FILE
        if not path.exists():
            return None
        info = read_info(path)
        wanted = (self.info.spec, self.metric, self.info.keys_fingerprint)
        return info if (info.spec, info.metric, info.keys_fingerprint) == wanted else None

    def _build(self, plan: IndexPlan) -> None:
        there = sum(file.stat().st_blocks * 512 for file in self.work.iterdir())  # of an interrupted build
        check_disk_space(self.work, plan.disk_bytes - there, f"building the index {self.info.name}")
        memory, disk = human_bytes(plan.memory_bytes), human_bytes(plan.disk_bytes)
        logger.info(
            f"needs about {memory} of memory, {disk} of disk while it is built, and "
            f"{estimate_time(plan, len(self.datastore), self.datastore.dim)}"
        )
        index = self._resumed()
        if index is None:
            for name in AFTER_TRAINING:  # of other centroids
                (self.work / name).unlink(missing_ok=True)
            index = train_index(self.datastore, plan, self.metric, self.seed, self.work, self.device)
            self._keep(index, TRAINED)
            (self.work / SAMPLE).unlink(missing_ok=True)
        path, ivf = self.work / INDEX_FILE, bare_ivf(index)
        if ivf is None or isinstance(ivf, FILLED_BY_FAISS):
            if self._write_elsewhere is not None:
                raise KnnlmError(f"only FAISS itself can fill an index {plan.factory}; use knnlm build for it")
            self._add_in_order(index)
            self.info.sha256 = write_faiss(index, path)
            self.info.head_bytes = head_bytes(index, path.stat().st_size)
        else:
            self._write_lists(ivf)
        self.info.bytes = path.stat().st_size
        self.info.head_sha256 = file_sha256(path, self.info.head_bytes)

    def _resumed(self) -> faiss.Index | None:
        """The index after training, or with the entries that an interrupted build had added."""
        for name in (ADDED, TRAINED):
            path, expected = self.work / name, self._record["files"].get(name)
            if path.exists() and expected and file_sha256(path) == expected:
                logger.info(f"continuing from {path}")
                return faiss.read_index(str(path))
        return None

    def _keep(self, index: faiss.Index, name: str) -> None:
        """Write an index that a later run can continue from."""
        self._record["files"][name] = write_faiss(index, self.work / name)
        write_json(self.work / BUILD_RECORD, self._record)

    def _add_in_order(self, index: faiss.Index) -> None:
        """As FAISS does it; what has been added is written now and then."""
        groups = quantizer_ivf(extract_ivf(index))
        if groups is not None:
            groups.nprobe = GROUPS_FOR_ADDING
        started = time.perf_counter()
        entries = len(self.datastore)
        with progress("adding", entries, " keys", index.ntotal) as bar:
            for block in self.datastore.key_blocks(ADD_BLOCK, start=index.ntotal):
                index.add(np.ascontiguousarray(block, np.float32))
                bar.update(len(block))
                if time.perf_counter() - started > CHECKPOINT_SECONDS and index.ntotal < entries:
                    before = time.perf_counter()
                    self._keep(index, ADDED)
                    # Writing a large index takes long; let it be a twentieth of the time at most.
                    started = time.perf_counter() + max(0.0, 20 * (time.perf_counter() - before) - CHECKPOINT_SECONDS)
        if groups is not None:
            groups.nprobe = GROUPS_FOR_SEARCHING  # FAISS keeps it in the file

    def _write_lists(self, ivf: faiss.IndexIVF) -> None:
        """Find the list of every key, then write the lists one after the other, in bounded memory."""
        groups = quantizer_ivf(ivf)
        if groups is not None:
            groups.nprobe = GROUPS_FOR_SEARCHING
        if self._write_elsewhere is not None:
            written = self._write_elsewhere(self.datastore, ivf, self.metric, self.work, self._record["files"][TRAINED])
        else:
            find_lists(self.datastore, ivf, self.metric, self.work / LISTS, ADD_BLOCK, self.device)
            lists = FoundLists(self.work / LISTS)
            written = ListWriter(self.datastore, ivf, lists, self.work).write(self.work / INDEX_FILE)
        self.info.sha256, self.info.head_bytes = written
        self.info.lists, self.info.code_bytes = ivf.nlist, ivf.code_size
        self.info.files = checksums(self.work)
