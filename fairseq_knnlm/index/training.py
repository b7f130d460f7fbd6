"""Training an index: the centroids of its lists, and its codes, from a sample of the keys."""

import logging
from collections.abc import Iterator
from pathlib import Path

import faiss
import numpy as np
import torch
from torch import Tensor

from ..datastore import Datastore
from ..storage import OutputFile, ShardedArray
from .info import bare_ivf, extract_ivf, faiss_metric, faiss_ranges, has_flat_quantizer, quantizer_ivf
from .kmeans import train_centroids, train_two_level_centroids
from .plan import IndexPlan

logger = logging.getLogger(__name__)

SAMPLE = "sample.npy"
RUNS_WANTED, LONGEST_RUN = 1 << 14, 256  # of consecutive keys in a sample
RUNS_PER_WRITE = 1 << 10
IN_MEMORY_BYTES = 1 << 28  # a larger sample is written to the work folder, and read as often as needed
BLOCK_ROWS = 1 << 15


def train_index(
    datastore: Datastore, plan: IndexPlan, metric: str, seed: int, work: Path, device: torch.device | str = "cpu"
) -> faiss.Index:
    """A trained and empty index. Centroids are found on ``device``."""
    assert plan.factory is not None  # what has no factory is never built
    index = faiss.index_factory(datastore.dim, plan.factory, faiss_metric(metric))
    ivf = extract_ivf(index)
    keep_keys_as_they_are(ivf, datastore)
    if isinstance(ivf, faiss.IndexIVFPQ):
        # minutes of work for a search by Hamming distance that we never do
        ivf.do_polysemous_training = False  # type: ignore[attr-defined]  # FAISS's types lack it
    if index.is_trained:
        return index
    logger.info(f"training on {plan.train_size:,} keys")
    sample = KeySample(datastore, plan.train_size, seed, work)
    bare = bare_ivf(index)
    groups = quantizer_ivf(bare)
    if bare is not None and groups is not None:
        centroids = train_two_level_centroids(sample, groups.nlist, bare.nlist, metric, seed, device)
        groups.cp.min_points_per_centroid = 1  # or FAISS warns: these points are few and all there are
        groups.train(centroids)
        groups.add(centroids)
    elif bare is not None and has_flat_quantizer(bare):
        # FAISS takes the centroids that are there and trains the codes only.
        bare.quantizer.add(train_centroids(sample.all(), bare.nlist, metric, seed, device))
    elif ivf is not None:
        ivf.cp.seed = seed
    if isinstance(ivf, faiss.IndexIVFScalarQuantizer) and not ivf.by_residual and bare is not None:
        ivf.is_trained = True  # its codes are the stored keys, which need no training
    else:
        index.train(sample.all())
    return index


def keep_keys_as_they_are(ivf: faiss.IndexIVF | None, datastore: Datastore) -> None:
    """Let the codes of a scalar quantizer be the stored keys themselves, where both have as many bits."""
    if not isinstance(ivf, faiss.IndexIVFScalarQuantizer):
        return
    kinds = {"float16": faiss.ScalarQuantizer.QT_fp16, "int8": faiss.ScalarQuantizer.QT_8bit}
    if ivf.sq.qtype == faiss.ScalarQuantizer.QT_fp16:
        ivf.by_residual = False
    if ivf.d == datastore.dim and kinds.get(datastore.manifest.key_dtype) == ivf.sq.qtype:
        ivf.by_residual = False
        if datastore.manifest.key_dtype == "int8":
            faiss.copy_array_to_vector(faiss_ranges(datastore.codec), ivf.sq.trained)


class KeySample:
    """A random part of the keys, in memory or, if it is large, in a file of the work folder."""

    def __init__(self, datastore: Datastore, count: int, seed: int, work: Path):
        self._datastore, self._count = datastore, count
        runs = sample_runs(len(datastore), count, seed)
        row_bytes = datastore.dim * np.dtype(datastore.manifest.key_dtype).itemsize
        self._stored: np.ndarray | ShardedArray
        if count * row_bytes <= IN_MEMORY_BYTES:
            self._stored = np.concatenate(list(self._read(runs)))
        else:
            self._stored = self._write(runs, work)

    def __len__(self) -> int:
        return self._count

    def _read(self, runs: np.ndarray) -> Iterator[np.ndarray]:
        """The stored keys of the runs. They are read, not mapped: the pages of a map would stay in memory."""
        for start, stop in runs.tolist():
            yield self._datastore.read_stored(start, stop)

    def _write(self, runs: np.ndarray, work: Path) -> ShardedArray:
        dim, dtype = self._datastore.dim, self._datastore.manifest.key_dtype
        with OutputFile(work / SAMPLE) as file:
            file.write_array_header((len(self), dim), dtype)
            for first in range(0, len(runs), RUNS_PER_WRITE):
                file.write(np.concatenate(list(self._read(runs[first : first + RUNS_PER_WRITE]))))
        return ShardedArray(work, [SAMPLE], [len(self)], (dim,), dtype, f"delete {work} and build again")

    def blocks(self) -> Iterator[Tensor]:
        """All keys, some at a time: (rows, dim) float32."""
        if isinstance(self._stored, ShardedArray):
            stored = self._stored.blocks(BLOCK_ROWS)
        else:
            stored = (self._stored[row : row + BLOCK_ROWS] for row in range(0, len(self), BLOCK_ROWS))
        for block in stored:
            yield torch.from_numpy(np.ascontiguousarray(self._datastore.codec.decode(block), np.float32))

    def all(self) -> np.ndarray:
        """All keys, (n, dim) float32."""
        return torch.cat(list(self.blocks())).numpy()


def sample_runs(entries: int, count: int, seed: int) -> np.ndarray:
    """``count`` entries, about evenly drawn, as runs of consecutive ones, ascending: (runs, 2), start and stop.

    A run is longer the larger the sample: single keys would be as many disk accesses.
    """
    length = int(np.clip(count // RUNS_WANTED, 1, LONGEST_RUN))
    length = min(length, max(1, entries // count))  # so that there is a choice
    number = -(-count // length)
    starts = length * np.sort(np.random.default_rng(seed).choice(entries // length, number, replace=False))
    stops = starts + length
    stops[-1] -= number * length - count
    return np.stack([starts, stops], axis=1)
