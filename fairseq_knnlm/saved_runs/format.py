"""A scored split on disk: what every mixture of the same LM and memories can be computed from, without either.

    DIR/run.json                 which model, text, datastores and flags; the result of the run
    DIR/lm.npy          (n,)     log p_LM of each token, float32
    DIR/tokens.npy      (n,)     the tokens
    DIR/<memory>.gaps.npy (n, k) float16: how much less similar a neighbour is than the most similar one
    DIR/<memory>.exponents.npy (n,)  the gaps are times 2 to this power, int8
    DIR/<memory>.largest.npy (n,)    the largest similarity, float32
    DIR/<memory>.matches.npy (n, k/8)  a bit for each neighbour: its value is the token
    DIR/<memory>.log_weights.npy (n, k)  log of the neighbours' weights, float32, where entries have weights
    DIR/<memory>.log_probs.npy (n, temperatures)  instead of these four where every visited entry takes part (k = all)
    DIR/<memory>.features.npy (n, features)  what a gate may look at, where it does not follow from the above
    DIR/<memory>.expected.npy (n, lists)     log of the share of the mass that each visited list was expected to hold
    DIR/<memory>.ranked.npy (n, ranks)       log p of the token with the nearest 1, 2, 4, 8, ... lists
    DIR/lm.features.npy (n, features)        what a gate may look at of the LM
    DIR/top.tokens.npy  (n, top) the most probable tokens of the LM, if they were asked for, the most probable first
    DIR/top.probs.npy   (n, top) their probabilities, float16

A memory is ``knn0``, ``knn1``, ..., ``head0``, ... or ``cache``, whose neighbours are the positions of the window, most
recent first. A head keeps ``log_probs``, at its own temperature.
Similarities are negative squared distances or inner products. A softmax sees differences only, and a difference of
x / T contributes exp(-x / T), so a relative error of 1/2048 in x changes a share by 0.02% at most, at any temperature.
"""

import itertools
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..datastore.manifest import value_dtype_for
from ..errors import KnnlmError
from ..memory import KeptLogProbs, MemoryFacts, MemoryScores
from ..search.target_mass import ranks
from ..storage import (
    Lock,
    OutputFile,
    check_disk_space,
    file_sha256,
    from_record,
    human_bytes,
    make_folder,
    publish_folder,
    read_versioned,
    write_record,
)
from ..storage.arrays import map_array
from ..storage.folders import clear_work_folder

FORMAT = "fairseq-knnlm save"
VERSION = 3
READABLE = (1, 2, 3)  # version 1 has nothing for a gate, version 2 no weights of entries
RUN = "run.json"
MANY_TYPES = 1 << 31  # whatever the dictionary of a run that does not say


@dataclass
class RunFacts:
    """What run.json says."""

    source: dict[str, Any]  # split, fingerprints of data, dictionary and checkpoint, context
    start: int  # the tokens of the split that were scored
    stop: int
    split_tokens: int
    memories: list[MemoryFacts]
    words: float | None = None  # of the text that was scored, where its data tells
    bytes: float | None = None
    perplexity: float | str | None = None  # of the run's own mixture; "inf" where that is infinite
    sha256: dict[str, str] = field(default_factory=dict)  # of each array's file
    features: list[str] | None = None  # of the LM, that a gate may look at; None: of an older release
    top: int = 0  # how many of the LM's most probable tokens are kept for each token
    format: str = FORMAT
    version: int = VERSION

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def identity(self) -> dict[str, Any]:
        """What parts of one run have in common."""
        memories = {memory.name: (memory.neighbors, memory.temperatures, memory.identity) for memory in self.memories}
        source = {name: value for name, value in self.source.items() if name != "data"}  # a moved folder is no change
        return {**source, "split tokens": self.split_tokens, "memories": memories, "top": self.top}


def array_shapes(run: RunFacts) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> shape and dtype of every array of a save."""
    n = run.tokens
    arrays: dict[str, tuple[tuple[int, ...], str]] = {"lm": ((n,), "float32"), "tokens": ((n,), "int32")}
    if run.features:
        arrays["lm.features"] = ((n, len(run.features)), "float32")
    for memory in run.memories:
        if memory.features:
            arrays[f"{memory.name}.features"] = ((n, len(memory.features)), "float32")
        if memory.lists:
            arrays[f"{memory.name}.expected"] = ((n, memory.lists), "float16")
            arrays[f"{memory.name}.ranked"] = ((n, ranks(memory.lists)), "float32")
        if memory.neighbors is None:
            arrays[f"{memory.name}.log_probs"] = ((n, len(memory.saved_temperatures)), "float32")
            continue
        arrays[f"{memory.name}.gaps"] = ((n, memory.neighbors), "float16")
        arrays[f"{memory.name}.exponents"] = ((n,), "int8")
        arrays[f"{memory.name}.largest"] = ((n,), "float32")
        arrays[f"{memory.name}.matches"] = ((n, -(-memory.neighbors // 8)), "uint8")
        if memory.weighted:
            arrays[f"{memory.name}.log_weights"] = ((n, memory.neighbors), "float32")
    if run.top:
        arrays["top.tokens"] = ((n, run.top), value_dtype_for(run.source.get("dictionary_size", MANY_TYPES)))
        arrays["top.probs"] = ((n, run.top), "float16")
    return arrays


def bytes_per_token(run: RunFacts) -> int:
    rows = (np.dtype(dtype).itemsize * int(np.prod(shape[1:])) for shape, dtype in array_shapes(run).values())
    return sum(rows)


def is_save_file(name: str) -> bool:
    """Whether a file of this name was written by a ``SaveWriter``."""
    return name == RUN or name.endswith(".npy")


class SaveWriter:
    """Writes a save in corpus order, under another name until it is whole."""

    def __init__(self, folder: str | Path, run: RunFacts):
        self.folder, self.run = Path(folder), run
        self._partial = self.folder.with_name(self.folder.name + ".partial")
        make_folder(self.folder.parent)
        self._lock = Lock(
            self.folder.with_name(self.folder.name + ".lock"), f"writing the save {self.folder}", wait=False,
            instead="choose another --knn-save folder",
        )  # fmt: skip
        self._lock.acquire()
        self._files: dict[str, OutputFile] = {}
        self._rows = dict.fromkeys(array_shapes(run), 0)
        self.bytes = run.tokens * bytes_per_token(run)
        try:
            self._check_place()
            self._open()
        except BaseException:
            self._drop()
            raise

    def _check_place(self) -> None:
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise KnnlmError(f"{self.folder} exists already; choose another --knn-save folder or delete this one")
        check_disk_space(self.folder.parent, self.bytes, f"--knn-save of {self.run.tokens:,} tokens")
        make_folder(self._partial)
        clear_work_folder(self._partial, is_save_file)  # of what a killed run left

    def _open(self) -> None:
        for name, (shape, dtype) in array_shapes(self.run).items():
            self._files[name] = OutputFile(self._partial / f"{name}.npy")
            self._files[name].write_array_header(shape, dtype)

    def describe(self) -> str:
        return f"saving {bytes_per_token(self.run):,} bytes per token, {human_bytes(self.bytes)}, to {self.folder}"

    def add(self, lm: Tensor, tokens: Tensor, features: Tensor | None = None) -> None:
        """The next tokens, (n,) both, and what a gate may look at of the LM (n, features)."""
        self._append("lm", lm.float().cpu().numpy())
        self._append("tokens", tokens.cpu().numpy())
        if self.run.features and features is not None:
            self._append("lm.features", features.float().cpu().numpy())

    @property
    def top(self) -> int:
        """How many of the LM's most probable tokens it wants of each token."""
        return self.run.top

    def add_top(self, tokens: Tensor, probs: Tensor) -> None:
        """The LM's most probable tokens at the next tokens, and their probabilities, (n, top) both."""
        self._append("top.tokens", tokens.numpy())
        self._append("top.probs", probs.numpy())

    def add_memory(self, number: int, scores: MemoryScores) -> None:
        """What the memory of this number keeps of the next tokens."""
        memory = self.run.memories[number]
        name = memory.name
        if memory.features and scores.features is not None:
            columns = torch.stack([scores.features[feature].float().cpu() for feature in memory.features], dim=1)
            self._append(f"{name}.features", columns.numpy())
        if isinstance(scores.kept, KeptLogProbs):
            self._append(f"{name}.log_probs", scores.kept.log_probs.float().cpu().numpy())
            if scores.kept.expected is not None and scores.kept.ranked is not None:
                self._append(f"{name}.expected", scores.kept.expected.float().clamp(min=-60000).cpu().numpy())
                self._append(f"{name}.ranked", scores.kept.ranked.float().cpu().numpy())
        elif scores.kept is not None:
            self._add_neighbors(name, scores.kept.similarities, scores.kept.matches)
            if memory.weighted and scores.kept.log_weights is not None:
                log_weights = scores.kept.log_weights.cpu()
                self._append(
                    f"{name}.log_weights", F.pad(log_weights, (0, memory.saved_neighbors - log_weights.size(1))).numpy()
                )

    def _add_neighbors(self, memory: str, near: Tensor, matches: Tensor) -> None:
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
            self._files[name].write(np.ascontiguousarray(rows, dtype))
        except KnnlmError:
            self.abort()
            raise
        self._rows[name] += len(rows)

    def finish(self, perplexity: float) -> None:
        """Make the save appear."""
        short = [name for name, rows in self._rows.items() if rows != self.run.tokens]
        if short:
            raise RuntimeError(f"{short} of the save have {self._rows} rows instead of {self.run.tokens}")
        self.run.perplexity = perplexity
        try:
            self.run.sha256 = {name: file.commit() for name, file in self._files.items()}
            write_record(self._partial / RUN, asdict(self.run))
            publish_folder(self._partial, self.folder, is_save_file)
        except KnnlmError:
            self.abort()
            raise
        self._lock.release()

    def abort(self) -> None:
        """Drop what was saved so far."""
        if self._partial.is_dir():
            clear_work_folder(self._partial, is_save_file)
        self._drop()

    def _drop(self) -> None:
        for file in self._files.values():
            file.abort()
        if self._partial.is_dir() and not any(self._partial.iterdir()):
            self._partial.rmdir()
        self._lock.release()


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
        content = read_versioned(folder / RUN, FORMAT, READABLE, remedy)
        again = f"delete {folder} and {remedy} again"
        memories = content.get("memories")
        if not isinstance(memories, list) or not all(isinstance(memory, dict) for memory in memories):
            raise KnnlmError(f"{folder / RUN} is damaged (it lists no memories); {again}")
        content["memories"] = [from_record(MemoryFacts, memory, folder / RUN, again) for memory in memories]
        run = from_record(RunFacts, content, folder / RUN, again)
        arrays = {}
        for name, (shape, dtype) in array_shapes(run).items():
            path = folder / f"{name}.npy"
            arrays[name] = map_array(path, shape, dtype, again)
            # A split is read as a whole anyway, and a wrong digit here would be a wrong result.
            if name in run.sha256 and file_sha256(path) != run.sha256[name]:
                raise KnnlmError(f"{path} is damaged (its checksum differs); {again}")
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
