"""Words and bytes of a text: what perplexities can be per where tokenizers differ."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import KnnlmError
from ..storage.arrays import map_array


@dataclass(frozen=True)
class TextCounts:
    """Of a text whose tokens are scored; a line that is cut counts in proportion, so they need not be whole."""

    words: float  # between blanks
    bytes: float

    @classmethod
    def of(cls, text: str) -> "TextCounts":
        return cls(len(text.split()), len(text.encode()))

    def per_word(self, log_prob: float) -> float:
        """The perplexity per word, from the sum of all log-probabilities."""
        return perplexity_per(log_prob, self.words)

    def bits_per_byte(self, log_prob: float) -> float:
        return -log_prob / max(self.bytes, 1) / math.log(2)

    def sentence(self, log_probs: dict[str, float]) -> str:
        """What a log says of the LM and the mixture."""
        names = {"base LM": log_probs["lm"], "mixture": log_probs["mixture"]}
        parts = [
            f"{name} {self.per_word(log_prob):.2f} per word, {self.bits_per_byte(log_prob):.4f} bits per byte"
            for name, log_prob in names.items()
        ]
        return f"perplexity over {self.words:,.0f} words, {self.bytes:,.0f} bytes: {'; '.join(parts)}"


def perplexity_per(log_prob: float, count: float) -> float:
    """exp(-log p / count); infinite where that is beyond all numbers."""
    try:
        return math.exp(-log_prob / max(count, 1))
    except OverflowError:
        return math.inf


def counts_path(split: str | Path) -> Path:
    """Where the words and bytes of each line of a split are, (lines, 2) int32."""
    return Path(f"{split}.counts.npy")


def has_counts(split: str | Path) -> bool:
    return counts_path(split).is_file()


def count_text(split: str | Path, lengths: np.ndarray, start: int, stop: int) -> TextCounts:
    """Words and bytes of the tokens from ``start`` to ``stop`` of a split.

    Args:
        split: its path
        lengths: tokens of each line
    """
    again = "run knnlm hf prepare again"
    counts = map_array(counts_path(split), (len(lengths), 2), "int32", again)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if stop > ends[-1]:
        raise KnnlmError(f"{counts_path(split)} does not belong to the split beside it; {again}")
    sums = np.concatenate([[[0, 0]], np.cumsum(counts, axis=0, dtype=np.int64)])
    words, length = (float(np.diff(np.interp([start, stop], ends, sums[:, column]))[0]) for column in (0, 1))
    return TextCounts(words, length)
