"""Keys and values of a datastore in shuffled mini-batches, read in small contiguous pieces.

An epoch visits all pieces in a random order; some hundred of them are in memory at a time, and their entries are mixed.
The order depends on the seed, the epoch and the datastore alone, so training can go on at any step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..datastore import Datastore
from ..parallel import ahead

PIECE = 256  # consecutive entries
PIECES_AT_ONCE = 256
POOLS_AHEAD = 1


@dataclass
class Batch:
    """Some entries of a datastore."""

    entries: np.ndarray  # (n,) their numbers
    keys: Tensor  # (n, dim) float32
    targets: Tensor  # (n,) int64: their values


class ShuffledPairs:
    """The entries of a datastore, ``batch`` at a time; what is left at the end of an epoch is left out."""

    def __init__(self, datastore: Datastore, batch: int, seed: int):
        self.datastore, self.batch, self._seed = datastore, min(batch, len(datastore)), seed
        self.steps = len(datastore) // self.batch  # of an epoch

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from the ``first`` on."""
        for entries, keys in ahead(self._pools(epoch, first * self.batch), POOLS_AHEAD):
            targets = torch.from_numpy(self.datastore.values[entries].astype(np.int64))
            for start in range(0, len(entries), self.batch):
                rows = slice(start, start + self.batch)
                yield Batch(entries[rows], keys[rows], targets[rows])

    def _pools(self, epoch: int, first: int) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Entries (m,) and keys (m, dim) of whole batches, from the ``first`` entry of the epoch on."""
        rest, rest_keys = np.empty(0, np.int64), torch.empty(0, self.datastore.dim)
        for entries in self._orders(epoch):
            if len(entries) <= first:  # done before
                first -= len(entries)
                continue
            entries = entries[first:]
            first = 0
            entries_and_rest = np.concatenate([rest, entries])
            keys = torch.cat([rest_keys, self._read(entries)])
            whole = len(keys) // self.batch * self.batch
            if whole:
                yield entries_and_rest[:whole], keys[:whole]
            rest, rest_keys = entries_and_rest[whole:], keys[whole:].clone()

    def _orders(self, epoch: int) -> Iterator[np.ndarray]:
        """Which entries come, in order, those of some pieces at a time."""
        pieces = np.random.default_rng([self._seed, epoch]).permutation(-(-len(self.datastore) // PIECE))
        for number, start in enumerate(range(0, len(pieces), PIECES_AT_ONCE)):
            some = pieces[start : start + PIECES_AT_ONCE]
            entries = (some[:, None] * PIECE + np.arange(PIECE)).ravel()
            entries = entries[entries < len(self.datastore)]
            yield np.random.default_rng([self._seed, epoch, number]).permutation(entries)

    def _read(self, entries: np.ndarray) -> Tensor:
        """Keys of entries that come in whole pieces but for the first ones: (m,) -> (m, dim) float32."""
        order = np.argsort(entries)
        ascending = entries[order]
        breaks = np.flatnonzero(np.diff(ascending) != 1) + 1
        keys = torch.empty(len(entries), self.datastore.dim)
        places = torch.from_numpy(order)
        if len(breaks) > 4 * PIECES_AT_ONCE:  # the rest of pieces that were used in part
            keys[places] = torch.from_numpy(self.datastore.gather_keys(ascending).astype(np.float32))
            return keys
        for start, stop in zip([0, *breaks], [*breaks, len(ascending)]):
            block = self.datastore.read_keys(int(ascending[start]), int(ascending[stop - 1]) + 1)
            keys[places[start:stop]] = torch.from_numpy(np.ascontiguousarray(block, np.float32))
        return keys
