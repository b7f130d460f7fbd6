"""Inverted lists written by the nodes of a cluster: the same bytes as one process writes.

1. The keys are cut into parts of whole shards. A job finds the list of every key of its part and writes the part's
   entries by list (``part-00000.rows``), and how many each list has (``part-00000.npy``).
2. Then the place of every list is known. Ranges of lists are cut into pieces. A job reads its lists from every part, in
   the order of the parts, sorts them by list and value, and writes them as they stand in the index
   (``piece-00000.lists``), with what stands beside them.
3. The driver joins the pieces.

All of that lies in the work folder of the build, which every node has to see. A file appears when it is whole, so a job
that was lost is done again from the beginning, and an interrupted build goes on with the jobs that are missing.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from ..datastore import Datastore
from ..datastore.list_file import ID_BYTES
from ..errors import KnnlmError
from ..index.assign import list_finder
from ..index.build import ADD_BLOCK, TRAINED
from ..index.info import INDEX_FILE, bare_ivf
from ..index.list_records import bucket_edges, encoder, interleave, make_records, record_dtype, sort_rows
from ..index.list_summary import ListSummary, join_sides
from ..index.list_writer import BUCKET_BYTES, BUCKETS_PER_PIECE, COPY_BYTES, index_head
from ..progress import Style, progress
from ..storage import OutputFile, check_disk_space, file_sha256, write_array
from .jobs import finished_jobs, job_processors
from .nodes import Node

PART_BYTES = 1 << 29  # of entries that a job of the first step has in memory


@dataclass
class Job:
    """What every job of a build needs to know."""

    folder: str  # of the datastore
    keys: str  # fingerprint of its keys
    work: str
    trained: str  # checksum of the trained index
    metric: str
    threads: int

    def open(self) -> tuple[Datastore, faiss.IndexIVF, faiss.Index]:
        """The datastore, the trained lists, and the index that owns them; on the node of a job."""
        Style.chosen = "none"
        torch.set_num_threads(self.threads)
        path = Path(self.work) / TRAINED
        if not path.exists() or file_sha256(path) != self.trained:
            raise KnnlmError(f"this node does not see {path}; build on a file system that all nodes share")
        datastore = Datastore(self.folder)
        if datastore.fingerprint != self.keys:
            raise KnnlmError(f"{self.folder} has other keys on this node; build on a file system that all nodes share")
        index = faiss.read_index(str(path))
        ivf = bare_ivf(index)
        assert ivf is not None
        return datastore, ivf, index


def rows_file(work: Path, part: int) -> Path:
    return work / f"part-{part:05d}.rows"


def counts_file(work: Path, part: int) -> Path:
    return work / f"part-{part:05d}.npy"


def piece_file(work: Path, piece: int) -> Path:
    return work / f"piece-{piece:05d}.lists"


# --- jobs -------------------------------------------------------------------------------------------------------------


def sort_part(job: Job, part: int, start: int, stop: int) -> int:
    """Write the entries [start, stop) by list; how many."""
    work = Path(job.work)
    datastore, ivf, _index = job.open()
    find, encode_block = list_finder(ivf, job.metric), encoder(ivf, datastore)
    blocks, first = [], start
    for stored in datastore.stored_blocks(ADD_BLOCK, start, stop):
        lists = find(np.ascontiguousarray(datastore.codec.decode(stored), np.float32))
        blocks.append(make_records(datastore, first, stored, lists, encode_block, record_dtype(ivf.code_size)))
        first += len(stored)
    rows = np.concatenate(blocks)
    with OutputFile(rows_file(work, part)) as file:
        file.write(rows[np.argsort(rows["list"], kind="stable")].view(np.uint8))
    write_array(counts_file(work, part), np.bincount(rows["list"], minlength=ivf.nlist).astype(np.int32))
    return stop - start


def write_piece(job: Job, piece: int, parts: int, buckets: list[tuple[int, int]]) -> int:
    """Write the lists of consecutive buckets, and what stands beside them; how many entries.

    Args:
        buckets: the lists [first, stop) of each bucket, which is sorted in memory
    """
    work = Path(job.work)
    datastore, ivf, _index = job.open()
    base, stop = buckets[0][0], buckets[-1][1]
    summary, entries = ListSummary(datastore, ivf, stop - base), 0
    edges = [base, *(end for _, end in buckets)]
    sources = [_PartRows(work, part, record_dtype(ivf.code_size), edges) for part in range(parts)]
    with OutputFile(piece_file(work, piece)) as file:
        for first, end in buckets:
            rows = sort_rows(np.concatenate([source.read(first, end) for source in sources]))
            rows["list"] -= base
            starts = np.searchsorted(rows["list"], np.arange(first - base, end - base + 1))
            summary.add(first - base, rows, starts)
            file.write(interleave(rows, starts, ivf.code_size))
            entries += len(rows)
        summary.write(work, piece)
        # The piece itself comes last: it says that the rest is there.
    return entries


class _PartRows:
    """The entries of one part, by list."""

    def __init__(self, work: Path, part: int, dtype: np.dtype, edges: list[int]):
        """edges: the lists between which will be read"""
        self._path, self._dtype = rows_file(work, part), dtype
        starts = np.concatenate([[0], np.cumsum(np.load(counts_file(work, part)), dtype=np.int64)])
        self._starts = dict(zip(edges, starts[edges].tolist()))

    def read(self, first: int, stop: int) -> np.ndarray:
        """The entries of the lists [first, stop)."""
        begin, end = self._starts[first], self._starts[stop]
        return np.fromfile(self._path, self._dtype, end - begin, offset=begin * self._dtype.itemsize)


# --- the driver -------------------------------------------------------------------------------------------------------


class ListBuilder:
    """Lets the nodes of a cluster write the lists of an index; ``build_index`` calls it as ``write_lists``."""

    def __init__(self, ray: Any, nodes: list[Node], part_bytes: int = PART_BYTES, bucket_bytes: int = BUCKET_BYTES):
        self._ray = ray
        self._part_bytes, self._bucket_bytes = part_bytes, bucket_bytes
        self._processors = job_processors(nodes)

    def __call__(
        self, datastore: Datastore, ivf: faiss.IndexIVF, metric: str, work: Path, trained: str
    ) -> tuple[str, int]:
        folder = datastore.folder.resolve()
        job = Job(str(folder), datastore.fingerprint, str(work.resolve()), trained, metric, self._processors)
        row_bytes = record_dtype(ivf.code_size).itemsize
        parts = plan_parts([shard.rows for shard in datastore.shards], max(1, self._part_bytes // row_bytes))
        missing = [number for number in range(len(parts)) if not counts_file(work, number).exists()]
        jobs = [(job, number, *parts[number]) for number in missing]
        left = sum(stop - start for _, _, start, stop in jobs)
        lists_bytes = len(datastore) * (ivf.code_size + ID_BYTES)
        check_disk_space(work, left * row_bytes + 2 * lists_bytes, "building the index with all nodes")
        self._run(sort_part, jobs, "assigning", len(datastore), left)
        sizes = sum(np.load(counts_file(work, number)).astype(np.int64) for number in range(len(parts)))
        starts = np.concatenate([[0], np.cumsum(sizes)])
        buckets = list(pairwise(bucket_edges(starts, row_bytes, self._bucket_bytes).tolist()))
        # Not by the number of nodes: a build may go on with others than it began with.
        pieces = [buckets[first : first + BUCKETS_PER_PIECE] for first in range(0, len(buckets), BUCKETS_PER_PIECE)]
        missing = [number for number in range(len(pieces)) if not piece_file(work, number).exists()]
        writing = [(job, number, len(parts), pieces[number]) for number in missing]
        left = sum(int(starts[own[-1][1]] - starts[own[0][0]]) for _, _, _, own in writing)
        self._run(write_piece, writing, "writing lists", len(datastore), left)
        return self._join(ivf, starts, work, len(pieces))

    def _run(self, function: Any, jobs: list[tuple], name: str, total: int, left: int) -> None:
        if jobs:
            with progress(name, total, " keys", total - left) as bar:
                for entries in finished_jobs(self._ray, function, jobs, {"num_cpus": self._processors}):
                    bar.update(sum(entries))

    def _join(self, ivf: faiss.IndexIVF, starts: np.ndarray, work: Path, pieces: int) -> tuple[str, int]:
        """One file of all pieces, and the arrays beside it; SHA-256, and how many bytes come before the lists."""
        head = index_head(ivf, np.diff(starts))
        size = len(head) + int(starts[-1]) * (ivf.code_size + ID_BYTES)
        with OutputFile(work / INDEX_FILE) as file:
            written = file.write(head)
            for piece in range(pieces):
                with open(piece_file(work, piece), "rb") as source:
                    while block := source.read(COPY_BYTES):
                        written += file.write(block)
            if written != size:
                raise KnnlmError(f"the pieces in {work} do not make the index; delete the folder and build again")
            sha256 = file.commit()
        join_sides(work, starts, pieces)
        return sha256, len(head)


def plan_parts(shard_rows: list[int], most: int) -> list[tuple[int, int]]:
    """Consecutive entries (start, stop) of whole shards, at most so many where a shard has no more."""
    parts: list[tuple[int, int]] = []
    start = stop = 0
    for rows in shard_rows:
        if stop > start and stop + rows - start > most:
            parts.append((start, stop))
            start = stop
        stop += rows
    return [*parts, (start, stop)]
