"""How keys are stored: in fewer dimensions than the model's, in 8 bits, or just as they are.

    DIR/projection.npy  (dim, source dim) float32   orthonormal rows; a stored key is projection @ state
    DIR/quantizer.npy   (2, dim) float32            int8 only: centre and step; a stored number c means centre + step c

The projection has no offset, so it serves both metrics: a difference of two states keeps its length as far as it lies
in the kept dimensions, and what an inner product loses in the others is nearly the same for all keys of a query.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import KnnlmError
from ..storage import file_sha256, write_array
from ..storage.arrays import map_array

if TYPE_CHECKING:
    from .manifest import Manifest

PROJECTION, QUANTIZER = "projection.npy", "quantizer.npy"
SAMPLE_ROWS = 1 << 16  # keys that a projection and 8-bit ranges are learnt from
CODES = 256
# What lies outside of the range is stored as its end. Of these shares left out at each end the best one is taken.
OUTLIER_SHARES = (0.0, 1e-4, 5e-4, 2e-3)
DIMENSIONS_AT_ONCE = 64


@dataclass
class Projection:
    """What the manifest says about the projection."""

    source_dim: int
    variance_kept: float  # share of the variance of the sample that lies in the kept dimensions
    sample: int  # keys that it was learnt from
    sha256: str | None = None


@dataclass
class Quantizer:
    """What the manifest says about 8-bit keys."""

    error: float  # mean squared error of the sample, as a share of its variance
    clipped: float  # share of the sample's numbers that lie outside of the range
    sample: int
    sha256: str | None = None


@dataclass(frozen=True)
class KeyForm:
    """What stored keys are to look like."""

    source_dim: int
    dim: int
    dtype: str

    @property
    def is_compact(self) -> bool:
        """Whether a sample has to be seen before keys can be stored."""
        return self.dim < self.source_dim or self.dtype == "int8"

    def facts(self) -> dict[str, Any]:
        """For a manifest, with nothing learnt yet."""
        return {
            "dim": self.dim,
            "key_dtype": self.dtype,
            "projection": Projection(self.source_dim, 0.0, 0) if self.dim < self.source_dim else None,
            "quantizer": Quantizer(0.0, 0.0, 0) if self.dtype == "int8" else None,
        }


@dataclass
class KeyCodec:
    """From states to stored keys and, as far as possible, back."""

    dtype: str
    projection: np.ndarray | None = None  # (dim, source dim)
    centre: np.ndarray | None = None  # (dim,), with int8
    step: np.ndarray | None = None  # (dim,), with int8

    def project(self, states: np.ndarray) -> np.ndarray:
        """States, or queries: (n, source dim) -> (n, dim) float32."""
        states = np.ascontiguousarray(states, np.float32)
        return states if self.projection is None else states @ self.projection.T

    def encode(self, states: np.ndarray) -> np.ndarray:
        """(n, source dim) -> (n, dim) in the stored dtype; too large a number becomes infinite, or in int8 the end."""
        return self.quantize(self.project(states))

    def quantize(self, keys: np.ndarray) -> np.ndarray:
        """Projected states as they are stored: (n, dim) floats -> (n, dim)."""
        if self.centre is None or self.step is None:
            with np.errstate(over="ignore"):
                return np.ascontiguousarray(keys, self.dtype)
        low, high = -CODES // 2, CODES // 2 - 1
        return np.rint((keys - self.centre) / self.step).clip(low, high).astype(np.int8)

    def decode(self, stored: np.ndarray) -> np.ndarray:
        """Stored keys (n, dim) as floats: float16 and float32 stay what they are."""
        if self.centre is None or self.step is None:
            return stored
        return self.centre + self.step * stored.astype(np.float32)

    def save(self, folder: Path, manifest: "Manifest") -> None:
        """Write the files and note their checksums in the manifest."""
        if self.projection is not None and manifest.projection is not None:
            manifest.projection.sha256 = write_array(folder / PROJECTION, self.projection)
        if self.centre is not None and self.step is not None and manifest.quantizer is not None:
            manifest.quantizer.sha256 = write_array(folder / QUANTIZER, np.stack([self.centre, self.step]))

    @classmethod
    def load(cls, folder: Path, manifest: "Manifest") -> "KeyCodec":
        codec = cls(manifest.key_dtype)
        remedy = f"restore it from a copy, or delete {folder} and dump it again"
        if manifest.projection is not None:
            shape = (manifest.dim, manifest.projection.source_dim)
            codec.projection = _read(folder / PROJECTION, shape, manifest.projection.sha256, remedy)
        if manifest.quantizer is not None:
            codec.centre, codec.step = _read(folder / QUANTIZER, (2, manifest.dim), manifest.quantizer.sha256, remedy)
        return codec


def _read(path: Path, shape: tuple[int, int], sha256: str | None, remedy: str) -> np.ndarray:
    array = np.array(map_array(path, shape, "float32", remedy))
    if sha256 is None or file_sha256(path) != sha256:
        raise KnnlmError(f"{path} is damaged (its checksum differs); {remedy}")
    return array


LearntCodec = tuple[KeyCodec, Projection | None, Quantizer | None]


def learn_codec(sample: np.ndarray, form: KeyForm) -> LearntCodec:
    """Principal components and 8-bit ranges of a sample of states (n, source dim), where they are asked for."""
    source_dim, dim, dtype = form.source_dim, form.dim, form.dtype
    if not np.isfinite(sample).all():
        raise KnnlmError("the model produced NaN or infinite keys; check the checkpoint, or run without --fp16")
    codec = KeyCodec(dtype)
    projection = quantizer = None
    if dim < source_dim:
        codec.projection, kept = _principal_components(sample, dim)
        projection = Projection(source_dim, round(kept, 6), len(sample))
    if dtype == "int8":
        keys = codec.project(sample)
        codec.centre, codec.step = _ranges(keys)
        decoded = codec.decode(codec.encode(sample))
        variance = float(((keys - keys.mean(axis=0)) ** 2).sum()) or 1.0
        outside = np.abs(keys - codec.centre) > codec.step * (CODES + 1) / 2
        error = float(((keys - decoded) ** 2).sum()) / variance
        quantizer = Quantizer(round(error, 9), round(float(outside.mean()), 6), len(sample))
    return codec, projection, quantizer


def check_dim(dim: int, source_dim: int, flag: str = "--knn-key-dim") -> None:
    if not 1 <= dim <= source_dim:
        raise KnnlmError(f"{flag} {dim} is not possible with keys of {source_dim} dimensions; use 1 to {source_dim}")


def _principal_components(sample: np.ndarray, dim: int) -> tuple[np.ndarray, float]:
    """The directions of the largest variance, (dim, source dim), and the share of the variance in them."""
    centred = sample.astype(np.float64) - sample.mean(axis=0, dtype=np.float64)
    variances, directions = np.linalg.eigh(centred.T @ centred)  # ascending
    kept = variances[-dim:].sum() / max(variances.sum(), np.finfo(float).tiny)
    components = directions[:, ::-1][:, :dim].T
    # A direction and its opposite are as good as each other; the same choice everywhere makes runs comparable.
    signs = np.sign(components[np.arange(dim), np.abs(components).argmax(axis=1)])
    return np.ascontiguousarray(components * signs[:, None], np.float32), float(kept)


def _ranges(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centre and step of each dimension, those with the least squared error: (n, dim) -> (dim,), (dim,)."""
    dim = keys.shape[1]
    centre, step = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for first in range(0, dim, DIMENSIONS_AT_ONCE):
        some = slice(first, first + DIMENSIONS_AT_ONCE)
        part = keys[:, some]
        least = np.full(part.shape[1], np.inf)
        for share in OUTLIER_SHARES:
            low, high = np.quantile(part, [share, 1 - share], axis=0).astype(np.float32)
            width = (high - low) / (CODES - 1)
            codec = KeyCodec("int8", None, (low + high) / 2, np.where(width > 0, width, 1).astype(np.float32))
            errors = ((codec.decode(codec.encode(part)) - part) ** 2).sum(axis=0)
            better = errors < least
            least[better] = errors[better]
            centre[some][better], step[some][better] = codec.centre[better], codec.step[better]  # type: ignore[index]
    return centre, step
