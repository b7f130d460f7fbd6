"""Raw text to binarised splits in the tokens of a Hugging Face model, as ``fairseq-preprocess`` would lay them out.

    DIR/dict.txt                 the tokens of the model, see hf_tokenizer.py
    DIR/<split>.bin, .idx        the tokens of a split, a line an item; memory-mapped, fairseq's own format
    DIR/<split>.counts.npy (lines, 2)  words and bytes of each line, int32
    DIR/hugging_face.json        what model it was made with, and the size of each split
"""

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
from fairseq.data.indexed_dataset import MMapIndexedDataset, _dtype_header_code, best_fitting_int_dtype

from ..errors import KnnlmError
from ..progress import progress
from ..storage import OutputFile, write_array
from .hf_tokenizer import OFFSET, HFTokenizer
from .text_counts import counts_path

CHUNK = 1 << 16  # characters that one thread of the tokenizer takes at once


@dataclass
class SplitSize:
    """How large a split is, in everything that a perplexity can be per."""

    lines: int = 0
    tokens: int = 0
    words: int = 0
    bytes: int = 0


@dataclass
class Chunk:
    """Some whole lines, and the line before them, which the tokenizer sees too."""

    before: str
    text: str
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = len(self.text.encode())


def read_chunks(path: str | Path, size: int = CHUNK) -> Iterator[Chunk]:
    """A text in pieces that can be tokenised apart and give the tokens of the whole.

    A piece ends where a line with something on it is followed by a line that begins with no blank: no tokenizer that
    splits text at blanks first joins what is left and right of such a newline. One that marks the beginning of a text
    in its own way would do so at each piece: so the line before goes with it, and its tokens are dropped.
    """
    before, length, position, number = "", 0, 0, 0
    lines: list[str] = []
    try:
        with open(path, "rb") as file:
            for raw in file:
                number += 1
                line = raw.decode()
                if length >= size and lines[-1].strip() and not line[:1].isspace():
                    yield Chunk(before, "".join(lines))
                    before, lines, length = lines[-1], [], 0
                lines.append(line)
                length += len(line)
                position += len(raw)
    except UnicodeDecodeError as error:
        raise KnnlmError(
            f"line {number:,} of {path} is not UTF-8 (byte {position + error.start:,}); convert the file, for example "
            "with iconv -f latin1 -t utf-8"
        ) from error
    except OSError as error:
        raise KnnlmError(f"{path} cannot be read: {error.strerror or error}; give a text file") from error
    if lines:
        yield Chunk(before, "".join(lines))


class SplitWriter:
    """Writes the tokens of one split; nothing of it appears before all of it is there."""

    def __init__(self, folder: Path, split: str, vocabulary_size: int):
        self._dtype = np.dtype(best_fitting_int_dtype(vocabulary_size))
        self._base = folder / split
        self._file = OutputFile(f"{self._base}.bin")
        self._lengths: list[np.ndarray] = []
        self._counts: list[tuple[int, int]] = []
        self.size = SplitSize()

    def add(self, tokens: np.ndarray, lengths: np.ndarray, counts: list[tuple[int, int]]) -> None:
        """The tokens of some lines, how many each has, and the words and bytes of each."""
        self._file.write(np.ascontiguousarray(tokens, self._dtype))
        self._lengths.append(lengths)
        self._counts += counts
        self.size.lines += len(lengths)
        self.size.tokens += len(tokens)
        self.size.words += sum(words for words, _ in counts)
        self.size.bytes += sum(length for _, length in counts)

    def finish(self) -> None:
        if not self.size.tokens:
            self._file.abort()
            raise KnnlmError(f"the text of {self._base.name} is empty; give a file with at least one word")
        lengths = np.concatenate(self._lengths).astype(np.int32)
        starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * self._dtype.itemsize
        header = struct.pack("<QBQ", 1, _dtype_header_code(self._dtype), len(lengths))
        with OutputFile(f"{self._base}.idx") as index:
            for part in (MMapIndexedDataset.Index._HDR_MAGIC, header, lengths, starts):
                index.write(part)
            write_array(counts_path(self._base), np.array(self._counts, np.int32))
            self._file.commit()


def binarise(tokenizer: HFTokenizer, vocabulary_size: int, text: str, folder: Path, split: str) -> SplitSize:
    """Tokenise a text on all cores, some chunks at a time, and write it as a split.

    Args:
        vocabulary_size: of the dictionary
        text: path of a text file
    """
    if not Path(text).is_file():
        raise KnnlmError(f"there is no text {text}; give a file")
    ends_line = np.array(tokenizer.ends_of_lines())
    writer = SplitWriter(folder, split, vocabulary_size)
    with progress(f"tokenising {split}", os.path.getsize(text), " bytes") as bar:
        for chunks in _batched(read_chunks(text), 8 * (os.cpu_count() or 1)):
            texts = [chunk.before + chunk.text for chunk in chunks]
            for chunk, encoding in zip(chunks, tokenizer.backend.encode_batch(texts, add_special_tokens=False)):
                first = _token_at(encoding, len(chunk.before), len(chunk.before) + len(chunk.text))
                ids = np.array(encoding.ids[first:], np.int64)
                if not len(ids):
                    continue
                ends = np.flatnonzero(ends_line[ids]) + 1
                if not len(ends) or ends[-1] < len(ids):  # the last line of the file, without a newline
                    ends = np.append(ends, len(ids))
                characters = [encoding.token_to_chars(first + int(end) - 1)[1] for end in ends[:-1]]
                bounds = [0, *(end - len(chunk.before) for end in characters), len(chunk.text)]
                lines = [chunk.text[start:stop] for start, stop in pairwise(bounds)]
                counts = [(len(line.split()), len(line.encode())) for line in lines]
                writer.add(ids + OFFSET, np.diff(ends, prepend=0), counts)
                bar.update(chunk.bytes)
    writer.finish()
    return writer.size


def _token_at(encoding, start: int, stop: int) -> int:  # type: ignore[no-untyped-def]
    """The first token of the characters from ``start`` on; a normaliser may have dropped some of them."""
    if start == 0:
        return 0
    found = (encoding.char_to_token(place) for place in range(start, stop))
    return next((token for token in found if token is not None), len(encoding.ids))


def _batched(chunks: Iterable[Chunk], count: int) -> Iterator[list[Chunk]]:
    chunks = iter(chunks)
    while some := list(islice(chunks, count)):
        yield some
