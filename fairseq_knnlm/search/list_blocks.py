"""Where the entries of inverted lists come from: our own files, in order and read ahead, or any FAISS index."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Optional, Protocol

import faiss
import numpy as np
import torch
from torch import Tensor

from ..datastore import Datastore
from ..datastore.key_codec import CODES, KeyCodec
from ..datastore.list_file import ListFile
from ..index.info import inverted_lists, stores_exact_keys
from ..index.list_files import SortedLists
from ..parallel import ahead
from .target_mass import runs

CHUNK_BYTES = 1 << 23  # of lists that are read at once
CHUNKS_AHEAD = 4
DTYPE_OF_BYTES = {1: np.uint8, 2: np.float16, 4: np.float32}  # of codes that are keys, by bytes per dimension
MOST_GAP_BYTES = 1 << 17  # between two wanted lists, which is read with them: shorter than another disk access


@dataclass
class ListBlock:
    """The entries of one list, in the order of their values."""

    number: int
    stored: Tensor  # (m, dim) keys: float16, float32, or FAISS's unsigned 8-bit codes
    ids: np.ndarray  # (m,)
    run_values: np.ndarray  # (runs,) ascending; a run is the entries of one value
    run_ends: np.ndarray  # (runs,) where each run ends
    weights: Tensor | None = None  # (m,) float32; None: each entry counts 1

    def values(self) -> np.ndarray:
        """The value of each entry, (m,)."""
        return np.repeat(self.run_values, np.diff(self.run_ends, prepend=0))


class Lists(Protocol):
    """The inverted lists of an index."""

    sizes: np.ndarray  # (lists,)

    def stream(self, numbers: np.ndarray) -> Iterator[ListBlock]:
        """The lists of these ascending numbers, one after the other."""


class KeyDecoder:
    """Stored keys as floats on a device, relative to a point near them."""

    def __init__(self, codec: KeyCodec, device: torch.device):
        self._device = device
        self._pins = device.type == "cuda"  # from pinned memory a copy goes on while the GPU computes
        self.step: Tensor | None = None
        self.lowest: Tensor | None = None
        if codec.centre is not None and codec.step is not None:
            self.step = torch.from_numpy(codec.step).to(device)
            # FAISS's codes are unsigned: c + 128
            self.lowest = torch.from_numpy(codec.centre - CODES // 2 * codec.step).to(device)

    def decode(self, stored: Tensor, origin: Tensor | None) -> Tensor:
        """(m, dim) -> (m, dim) float32, minus ``origin`` (dim,)."""
        pins = self._pins and stored.device.type == "cpu"
        keys = (stored.pin_memory() if pins else stored).to(self._device, non_blocking=pins)
        return decoded(keys, origin, self.step, self.lowest)


def decoded(stored: Tensor, origin: Optional[Tensor], step: Optional[Tensor], lowest: Optional[Tensor]) -> Tensor:
    """Keys (m, dim), or codes that stand for ``lowest`` + code * ``step`` (dim,), minus an origin (dim,): float32."""
    keys = stored.float()
    if step is not None and lowest is not None and stored.dtype == torch.uint8:
        return torch.addcmul(lowest if origin is None else lowest - origin, keys, step)
    return keys if origin is None else keys - origin


class FileLists:
    """Lists that we wrote: plain large reads in the order of the file, by a thread of their own."""

    def __init__(self, lists: SortedLists, datastore: Datastore, holds_keys: bool):
        self._lists, self._datastore, self._holds_keys = lists, datastore, holds_keys
        self.sizes = np.diff(lists.file.starts)
        self._dtype = DTYPE_OF_BYTES.get(lists.info.code_bytes // datastore.dim, np.uint8)

    def stream(self, numbers: np.ndarray) -> Iterator[ListBlock]:
        file = self._lists.file
        chunks = plan_chunks(file, numbers)
        read = ((chunk, file.read(int(chunk[0]), int(chunk[-1]) + 1)) for chunk in chunks)
        much = len(numbers) and int(self.sizes[numbers].sum()) * file.row_bytes > CHUNK_BYTES
        for chunk, data in ahead(read, CHUNKS_AHEAD) if much else read:  # a little is here sooner than a thread
            for number in chunk.tolist():
                codes, ids = file.split(data, int(chunk[0]), number)
                stored = codes.view(self._dtype) if self._holds_keys else as_floats(self._datastore, ids)
                yield ListBlock(number, torch.from_numpy(stored), ids, *self.runs(number), self.weights(number))

    @property
    def bytes(self) -> int:
        """Of the file that they are in."""
        return self._lists.info.bytes

    def weights(self, number: int) -> Tensor | None:
        """The weights of a list's entries, (m,); None: each counts 1."""
        weights = self._lists.weights_of(number)
        return None if weights is None else torch.from_numpy(weights)

    def will_need(self, numbers: np.ndarray) -> None:
        """Let the system read these lists into its cache at once, for somebody who will touch them page by page."""
        self._lists.file.will_need(numbers)

    def runs(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The values of a list and where the run of each ends: (runs,), (runs,)."""
        return self._lists.run_values_of(number), self._lists.run_ends_of(number)


def plan_chunks(file: ListFile, numbers: np.ndarray) -> list[np.ndarray]:
    """Split ascending list numbers so that those of a part stand close together and are not too much at once."""
    begins, ends = file.starts[numbers] * file.row_bytes, file.starts[numbers + 1] * file.row_bytes
    chunks, first = [], 0
    for place in range(1, len(numbers) + 1):
        if (
            place == len(numbers)
            or begins[place] - ends[place - 1] > MOST_GAP_BYTES
            or ends[place] - begins[first] > CHUNK_BYTES
        ):
            chunks.append(numbers[first:place])
            first = place
    return chunks


class ResidentLists:
    """A range of our lists in the memory of a device, where they are read once and stay."""

    def __init__(self, lists: FileLists, device: torch.device, first: int, stop: int):
        """The lists from ``first`` to ``stop`` (not included)."""
        self._lists, self.sizes = lists, lists.sizes
        self._stored: dict[int, Tensor] = {}
        self._ids: dict[int, np.ndarray] = {}
        self._weights: dict[int, Tensor] = {}
        numbers = np.arange(first, stop)
        for block in lists.stream(numbers[self.sizes[first:stop] > 0]):
            self._stored[block.number], self._ids[block.number] = block.stored.to(device), block.ids.copy()
            if block.weights is not None:
                self._weights[block.number] = block.weights.to(device)

    def stream(self, numbers: np.ndarray) -> Iterator[ListBlock]:
        for number in numbers.tolist():
            runs = self._lists.runs(number)
            yield ListBlock(number, self._stored[number], self._ids[number], *runs, self._weights.get(number))


class FaissLists:
    """The lists of an index as FAISS has opened it: imported, of an older release, or with other codes than keys."""

    def __init__(self, ivf: faiss.IndexIVF, datastore: Datastore):
        self._ivf, self._datastore = ivf, datastore
        self.sizes = np.array([ivf.get_list_size(number) for number in range(ivf.nlist)], np.int64)
        self._read_keys = self._key_reader()

    def _key_reader(self) -> Callable[[int, np.ndarray, np.ndarray], np.ndarray]:
        """A function (list, ids (m,) in the order of values, their places in the list (m,)) -> keys (m, dim)."""
        if self._ivf.d != self._datastore.dim or not stores_exact_keys(self._ivf, self._datastore):
            return lambda number, ids, order: as_floats(self._datastore, ids)
        dtype = DTYPE_OF_BYTES[self._ivf.code_size // self._ivf.d]

        def read(number: int, ids: np.ndarray, order: np.ndarray) -> np.ndarray:
            size = self._ivf.get_list_size(number)
            codes = faiss.rev_swig_ptr(inverted_lists(self._ivf).get_codes(number), size * self._ivf.code_size)
            return codes.view(dtype).reshape(size, -1)[order]

        return read

    def stream(self, numbers: np.ndarray) -> Iterator[ListBlock]:
        for number in numbers.tolist():
            yield self._block(number)

    def _block(self, number: int) -> ListBlock:
        ids = faiss.rev_swig_ptr(inverted_lists(self._ivf).get_ids(number), self._ivf.get_list_size(number))
        values = self._datastore.values_of(ids)
        order = values.argsort(kind="stable")
        stored = torch.from_numpy(self._read_keys(number, ids[order], order))
        weights = self._datastore.weights
        own = None if weights is None else torch.from_numpy(weights[ids[order]])
        return ListBlock(number, stored, ids[order], *runs(values[order]), own)


def as_floats(datastore: Datastore, ids: np.ndarray) -> np.ndarray:
    """Keys from the shards, where the index has other codes."""
    return np.ascontiguousarray(datastore.gather_keys(ids))
