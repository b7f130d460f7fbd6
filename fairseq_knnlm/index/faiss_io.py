"""FAISS indexes through the one writer."""

from pathlib import Path

import faiss

from ..errors import KnnlmError
from ..storage import OutputFile
from .info import last_line

BLOCK = 1 << 24
MOST_HEAD_BYTES = 1 << 28


def write_faiss(index: faiss.Index, path: Path) -> str:
    """Write an index atomically; its SHA-256, which is computed on the way."""
    failures: list[Exception] = []
    waiting = bytearray()

    with OutputFile(path) as file:

        def write(data: bytes) -> None:
            """Collect the many small pieces in which FAISS writes."""
            waiting.extend(data)
            if len(waiting) >= BLOCK:
                flush()

        def flush() -> None:
            try:
                file.write(bytes(waiting))
            except KnnlmError as error:  # FAISS would report something of its own
                failures.append(error)
                raise
            waiting.clear()

        try:
            writer = faiss.PyCallbackIOWriter(write, BLOCK)  # type: ignore[attr-defined]  # FAISS's types lack it
            faiss.write_index(index, writer)
            flush()
        except Exception as error:
            if failures:
                raise failures[0] from error
            raise KnnlmError(f"{path} cannot be written ({last_line(error)}); use another --knn-index") from error
        return file.commit()


def head_bytes(index: faiss.Index, size: int) -> int:
    """How much of an index file of this size describes its structure: all that comes before the inverted lists.

    FAISS believes what it reads there, so a damaged number ends in a crash; damage in a list changes neighbours only.
    """
    inner = index
    while isinstance(inner, faiss.IndexPreTransform):
        inner = faiss.downcast_index(inner.index)
    if isinstance(inner, faiss.IndexIVF) and not isinstance(inner, faiss.IndexIVFFastScan | faiss.IndexIVFPQR):
        return size - index.ntotal * (inner.code_size + 8)
    return min(size, MOST_HEAD_BYTES)
