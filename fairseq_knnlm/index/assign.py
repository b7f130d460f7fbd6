"""Which inverted list each key belongs to."""

import os
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import torch

from ..datastore import Datastore
from ..progress import progress
from ..storage import system
from ..storage.faults import read_failure, write_failure
from .info import has_flat_quantizer, quantizer_ivf
from .kmeans import GroupedCentroids, nearest_centroids
from .plan import GROUPS_FOR_ADDING

NUMBERS_AT_ONCE = 1 << 24


def list_finder(
    ivf: faiss.IndexIVF, metric: str, device: torch.device | str = "cpu"
) -> Callable[[np.ndarray], np.ndarray]:
    """A function from keys (n, dim) float32 to the list of each, (n,), found on ``device``."""
    groups = quantizer_ivf(ivf)
    if groups is None and not has_flat_quantizer(ivf):
        return lambda keys: ivf.quantizer.assign(keys, 1)[:, 0]
    centroids = torch.from_numpy(ivf.quantizer.reconstruct_n(0, ivf.nlist)).to(device)
    if groups is None:
        return lambda keys: nearest_centroids(torch.from_numpy(keys).to(device), centroids, metric)[:, 0].cpu().numpy()
    centres = torch.from_numpy(groups.quantizer.reconstruct_n(0, groups.nlist)).to(device)
    grouped = GroupedCentroids(centres, centroids, metric)
    return lambda keys: grouped.nearest(torch.from_numpy(keys).to(device), GROUPS_FOR_ADDING).cpu().numpy()


def find_lists(
    datastore: Datastore,
    ivf: faiss.IndexIVF,
    metric: str,
    path: Path,
    block_rows: int,
    device: torch.device | str = "cpu",
) -> None:
    """Write the list of every key, (entries,) int32, to a file that an interrupted build goes on with.

    The caller is the only process that writes the file, and its content is a matter of this machine's life only: after
    a crash of the machine the file may be shorter, which costs the repetition of that part.
    """
    find = list_finder(ivf, metric, device)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            done = _sound_rows(descriptor, ivf.nlist)
            os.ftruncate(descriptor, 4 * done)
            os.lseek(descriptor, 0, os.SEEK_END)
            with progress("assigning", len(datastore), " keys", done) as bar:
                for block in datastore.key_blocks(block_rows, start=done):
                    lists = find(np.ascontiguousarray(block, np.float32)).astype(np.int32)
                    system.write(descriptor, lists.data.cast("B"))
                    bar.update(len(block))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise write_failure(error, path) from error


class FoundLists:
    """The list of every key, in the file that ``find_lists`` has written.

    It is read where it is needed: what is mapped counts as memory once it has been touched, and all of it is.
    """

    def __init__(self, path: Path):
        self._path = path
        self._count = path.stat().st_size // 4

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> np.ndarray:
        """Those of the keys from ``start`` to ``stop`` (not included): (stop - start,) int32."""
        try:
            return np.fromfile(self._path, np.int32, stop - start, offset=4 * start)
        except OSError as error:
            raise read_failure(error, self._path) from error


def _sound_rows(descriptor: int, nlist: int) -> int:
    """How many numbers of the file are there and can be lists."""
    sound = 0
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        while len(lists := np.fromfile(file, np.int32, NUMBERS_AT_ONCE)):
            wrong = np.flatnonzero((lists < 0) | (lists >= nlist))
            if len(wrong):
                return sound + int(wrong[0])
            sound += len(lists)
    return sound
