"""Sentence embeddings of a split on disk, with what they belong to: computed once and frozen.

    DIR/embeddings.json     which text, which dictionary, how they were made
    DIR/embeddings.npy      (sentences, dim) float32

"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data.sentences import Sentences
from ..errors import KnnlmError
from ..storage import (
    Lock,
    check_array_file,
    check_disk_space,
    from_record,
    make_folder,
    read_versioned,
    remove_stale_files,
    write_array,
    write_record,
)

FORMAT = "fairseq-knnlm sentence-embeddings"
VERSION = 1
FACTS, ARRAY = "embeddings.json", "embeddings.npy"
REMEDY = "make it with knnlm embed"


@dataclass
class EmbeddingFacts:
    """What embeddings.json says."""

    sentences: int
    dim: int
    text_sha256: str
    dictionary_sha256: str
    source: dict[str, Any]  # an LM's key, layer and weights, or the file of an array
    array_sha256: str
    format: str = FORMAT
    version: int = VERSION


def write_embeddings(
    folder: Path, array: np.ndarray, sentences: Sentences, dictionary_sha256: str, source: dict[str, Any]
) -> EmbeddingFacts:
    """Write a whole folder, the facts last. array: (sentences, dim)"""
    if array.ndim != 2 or len(array) != len(sentences):
        raise KnnlmError(
            f"the embeddings have the shape {array.shape}, but there are {len(sentences):,} sentences; give an array "
            "with one row for each"
        )
    array = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(array).all():
        raise KnnlmError("the embeddings hold infinite numbers or nan; make them again without")
    make_folder(folder)
    with Lock(folder / f"{FACTS}.lock", f"writing {folder}"):
        remove_stale_files(folder)
        check_disk_space(folder, array.nbytes, "the embeddings")
        checksum = write_array(folder / ARRAY, array)
        facts = EmbeddingFacts(
            len(array), array.shape[1], sentences.fingerprint(), dictionary_sha256, source, checksum
        )
        write_record(folder / FACTS, asdict(facts))
    return facts


def read_embeddings(folder: Path, sentences: Sentences, dictionary_sha256: str) -> np.ndarray:
    """The embeddings of these sentences, (n, dim), refused if they are of other ones."""
    content = read_versioned(folder / FACTS, FORMAT, VERSION, REMEDY)
    again = f"delete {folder} and {REMEDY} again"
    facts = from_record(EmbeddingFacts, content, folder / FACTS, again)
    if facts.dictionary_sha256 != dictionary_sha256:
        raise KnnlmError(f"{folder} was made with another dictionary; run knnlm embed for this data")
    if facts.sentences != len(sentences) or facts.text_sha256 != sentences.fingerprint():
        raise KnnlmError(
            f"{folder} was made for another text ({facts.sentences:,} sentences, here {len(sentences):,}); run knnlm "
            "embed for this one, or choose another --embeddings"
        )
    check_array_file(folder / ARRAY, (facts.sentences, facts.dim), "float32", again, FACTS)
    return np.load(folder / ARRAY)


def centre_of(array: np.ndarray) -> np.ndarray:
    """The mean of the prototypes' embeddings, (d,), which is taken off all of them."""
    return array.mean(axis=0, dtype=np.float64).astype(np.float32)


def prepared(array: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """Embeddings around zero and of length one, (n, d): states of an LM share a large mean, which tells nothing."""
    moved = array - centre
    return moved / np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-12)
