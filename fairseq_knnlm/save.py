"""A scored split on disk: what every mixture of the same LM and memories can be computed from, without either.

    DIR/run.json                 which model, text, datastores and flags; the result of the run
    DIR/lm.npy          (n,)     log p_LM of each token, float32
    DIR/tokens.npy      (n,)     the tokens
    DIR/<memory>.gaps.npy (n, k) float16: how much less similar a neighbour is than the most similar one
    DIR/<memory>.exponents.npy (n,)  the gaps are times 2 to this power, int8
    DIR/<memory>.largest.npy (n,)    the largest similarity, float32
    DIR/<memory>.matches.npy (n, k/8)  a bit for each neighbour: its value is the token
    DIR/<memory>.log_probs.npy (n, temperatures)  instead of these four where every visited entry takes part (k = all)

A memory is ``knn0``, ``knn1``, ... or ``cache``, whose neighbours are the positions of the window, most recent first.
Similarities are negative squared distances or inner products. A softmax sees differences only, and a difference of
x / T contributes exp(-x / T), so a relative error of 1/2048 in x changes a share by 0.02% at most, at any temperature.
"""

import itertools
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import KnnlmError
from .files import check_disk_space, disk_full, human_bytes, read_versioned, write_json

FORMAT = "fairseq-knnlm save"
VERSION = 1
RUN = "run.json"


@dataclass
class MemoryFacts:
    """One memory of a saved run: what it is and how it was used."""

    name: str  # knn0, knn1, ..., cache
    neighbors: int | None  # k, or the cache's size; None: every visited entry
    weight: float  # lambda
    sharpness: float  # 1 / temperature, or theta
    identity: dict[str, Any]  # what makes two memories the same: fingerprint, metric, index, ...
    temperatures: list[float] | None = None  # where every visited entry takes part: those that were saved

    @property
    def is_cache(self) -> bool:
        return self.name == "cache"


@dataclass
class RunFacts:
    """What run.json says."""

    source: dict[str, Any]  # split, fingerprints of data, dictionary and checkpoint, context
    start: int  # the tokens of the split that were scored
    stop: int
    split_tokens: int
    memories: list[MemoryFacts]
    perplexity: float | None = None  # of the run's own mixture
    format: str = FORMAT
    version: int = VERSION

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def identity(self) -> dict[str, Any]:
        """What parts of one run have in common."""
        memories = {memory.name: (memory.neighbors, memory.temperatures, memory.identity) for memory in self.memories}
        source = {name: value for name, value in self.source.items() if name != "data"}  # a moved folder is no change
        return {**source, "split tokens": self.split_tokens, "memories": memories}


def array_shapes(run: RunFacts) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> shape and dtype of every array of a save."""
    n = run.tokens
    arrays: dict[str, tuple[tuple[int, ...], str]] = {"lm": ((n,), "float32"), "tokens": ((n,), "int32")}
    for memory in run.memories:
        if memory.neighbors is None:
            arrays[f"{memory.name}.log_probs"] = ((n, len(memory.temperatures)), "float32")
            continue
        arrays[f"{memory.name}.gaps"] = ((n, memory.neighbors), "float16")
        arrays[f"{memory.name}.exponents"] = ((n,), "int8")
        arrays[f"{memory.name}.largest"] = ((n,), "float32")
        arrays[f"{memory.name}.matches"] = ((n, -(-memory.neighbors // 8)), "uint8")
    return arrays


def bytes_per_token(run: RunFacts) -> int:
    rows = (np.dtype(dtype).itemsize * int(np.prod(shape[1:])) for shape, dtype in array_shapes(run).values())
    return sum(rows)


class SaveWriter:
    """Writes a save in corpus order, under another name until it is whole."""

    def __init__(self, folder: str | Path, run: RunFacts):
        self.folder, self.run = Path(folder), run
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise KnnlmError(f"{self.folder} exists already; choose another --knn-save folder or delete this one")
        self._partial = self.folder.with_name(self.folder.name + ".partial")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if self._partial.exists():  # left by a killed run
            shutil.rmtree(self._partial)
        self.bytes = run.tokens * bytes_per_token(run)
        check_disk_space(self.folder.parent, self.bytes, f"--knn-save of {run.tokens:,} tokens")
        self._partial.mkdir()
        self._files, self._rows = {}, dict.fromkeys(array_shapes(run), 0)
        for name, (shape, dtype) in array_shapes(run).items():
            self._files[name] = open(self._partial / f"{name}.npy", "wb")  # noqa: SIM115  closed by finish or abort
            header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(self._files[name], header)

    def describe(self) -> str:
        return f"saving {bytes_per_token(self.run):,} bytes a token, {human_bytes(self.bytes)}, to {self.folder}"

    def add(self, lm: Tensor, tokens: Tensor) -> None:
        """The next tokens, (n,) both."""
        self._append("lm", lm.float().cpu().numpy())
        self._append("tokens", tokens.cpu().numpy())

    def add_log_probs(self, memory: str, log_probs: Tensor) -> None:
        """The next tokens' log-probabilities at each temperature, (n, temperatures)."""
        self._append(f"{memory}.log_probs", log_probs.float().cpu().numpy())

    def add_neighbors(self, memory: str, near: Tensor, matches: Tensor) -> None:
        """The next tokens' similarities (n, k') and matches (n, k'); k' may be smaller than the save's k."""
        k = array_shapes(self.run)[f"{memory}.gaps"][0][1]
        missing = (0, k - near.size(1))
        near, matches = F.pad(near.cpu(), missing, value=-torch.inf), F.pad(matches.cpu(), missing)
        largest = near.max(dim=1).values
        gaps = (largest.nan_to_num(neginf=0.0)[:, None] - near).numpy()
        finite = np.where(np.isfinite(gaps), gaps, 0).max(axis=1)
        exponents = np.maximum(0, np.frexp(finite / 32768)[1])
        with np.errstate(over="ignore"):  # infinite gaps stay infinite
            self._append(f"{memory}.gaps", np.ldexp(gaps, -exponents[:, None]))
        self._append(f"{memory}.exponents", exponents)
        self._append(f"{memory}.largest", largest.numpy())
        self._append(f"{memory}.matches", np.packbits(matches.numpy(), axis=1))

    def _append(self, name: str, rows: np.ndarray) -> None:
        _, dtype = array_shapes(self.run)[name]
        try:
            self._files[name].write(np.ascontiguousarray(rows, dtype).data)
        except OSError as error:
            self.abort()
            raise disk_full(error, self.folder) from error
        self._rows[name] += len(rows)

    def finish(self, perplexity: float) -> None:
        """Make the save appear."""
        short = [name for name, rows in self._rows.items() if rows != self.run.tokens]
        if short:
            raise RuntimeError(f"{short} of the save have {self._rows} rows instead of {self.run.tokens}")
        self.run.perplexity = perplexity
        try:
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
                file.close()
            write_json(self._partial / RUN, asdict(self.run))
            if self.folder.exists():
                self.folder.rmdir()  # empty, or this fails
            os.replace(self._partial, self.folder)
        except OSError as error:
            self.abort()
            raise disk_full(error, self.folder) from error

    def abort(self) -> None:
        for file in self._files.values():
            try:
                file.close()  # flushes, which on a full disk fails once more
            except OSError:
                continue
        shutil.rmtree(self._partial, ignore_errors=True)


@dataclass
class SavePart:
    """One folder, open for reading; the arrays are mapped."""

    folder: Path
    run: RunFacts
    arrays: dict[str, np.ndarray] = field(repr=False)

    @classmethod
    def open(cls, folder: str | Path) -> "SavePart":
        folder = Path(folder)
        remedy = "make it with fairseq-eval-lm --knn-save"
        content = read_versioned(folder / RUN, FORMAT, VERSION, remedy)
        try:
            content["memories"] = [MemoryFacts(**memory) for memory in content["memories"]]
            run = RunFacts(**content)
        except (TypeError, KeyError) as error:
            raise KnnlmError(f"{folder / RUN} is damaged ({error}); delete {folder} and {remedy} again") from error
        arrays = {}
        for name, (shape, dtype) in array_shapes(run).items():
            path = folder / f"{name}.npy"
            try:
                arrays[name] = np.load(path, mmap_mode="r" if run.tokens else None)
            except (ValueError, OSError, EOFError) as error:
                message = f"{path} is missing, truncated or damaged ({error}); delete {folder} and {remedy} again"
                raise KnnlmError(message) from error
            if arrays[name].shape != shape or arrays[name].dtype != np.dtype(dtype):
                raise KnnlmError(f"{path} does not fit {RUN}; delete {folder} and {remedy} again")
        return cls(folder, run, arrays)


def open_save(folders: list[str] | list[Path]) -> list[SavePart]:
    """The parts of one run (--num-shards), in corpus order."""
    parts = sorted((SavePart.open(folder) for folder in folders), key=lambda part: part.run.start)
    first = parts[0]
    for part in parts[1:]:
        ours, theirs = first.run.identity(), part.run.identity()
        different = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
        if different:
            raise KnnlmError(
                f"{first.folder} and {part.folder} are of different runs ({', '.join(different)}); "
                "give saves of one run only, its --num-shards parts"
            )
    for before, part in itertools.pairwise(parts):
        if part.run.start < before.run.stop:
            raise KnnlmError(f"{before.folder} and {part.folder} hold the same tokens; give each part once")
    if sum(part.run.tokens for part in parts) == 0:
        raise KnnlmError(f"{first.folder} is empty; score at least one token with --knn-save")
    return parts
