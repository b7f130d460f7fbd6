"""Which blocks of a corpus a process reads, and which of these it scores."""

from dataclasses import dataclass

import numpy as np

from ..errors import KnnlmError

Range = tuple[int, int]  # blocks from the first number up to, and without, the second


def contiguous_part(count: int, num_parts: int, part: int) -> tuple[int, int]:
    """Start and stop of one of ``num_parts`` nearly equal contiguous parts of ``count`` things."""
    if not 0 <= part < num_parts:
        raise KnnlmError(f"--shard-id {part} does not exist with --num-shards {num_parts}; use 0 to {num_parts - 1}")
    return count * part // num_parts, count * (part + 1) // num_parts


def blocks_before(rows: np.ndarray, first: int, tokens: int) -> int:
    """The first of the blocks that hold at least ``tokens`` tokens before block ``first``."""
    tokens_before = np.cumsum(rows[:first][::-1])
    return max(0, first - 1 - int(np.searchsorted(tokens_before, tokens))) if tokens > 0 else first


def warm_up_ranges(rows: np.ndarray, ranges: list[Range], tokens: int) -> list[Range]:
    """The blocks outside of ``ranges`` (ascending) that hold the ``tokens`` tokens before each of them."""
    found, last = [], 0
    for start, stop in ranges:
        first = max(last, blocks_before(rows, start, tokens))
        if first < start:
            found.append((first, start))
        last = stop
    return found


@dataclass
class ReadingPlan:
    """What a process reads: blocks to score, and before them blocks that only the cache and the model have to know.

    Example: blocks of 10 tokens, of which this process scores 4 to 6, with a cache of 15 tokens. Then ``scored`` is
    [(4, 6)], ``warm_up`` is [(2, 4)], the first token that the cache sees is token 20, and tokens 40 to 60 are scored.
    """

    rows: np.ndarray  # tokens of each block of the corpus
    scored: list[Range]  # ascending
    warm_up: list[Range]

    @classmethod
    def of(cls, rows: np.ndarray, scored: list[Range], tokens_before: int) -> "ReadingPlan":
        """Plan to score these blocks, after reading so many tokens before each range of them."""
        return cls(rows, scored, warm_up_ranges(rows, scored, tokens_before))

    @property
    def ranges(self) -> list[Range]:
        """All blocks that are read, in order."""
        return sorted(self.warm_up + self.scored)

    @property
    def tokens(self) -> int:
        """How many tokens are read."""
        return sum(int(self.rows[start:stop].sum()) for start, stop in self.ranges)

    @property
    def first_read(self) -> int:
        """The position of the first token that is read."""
        return self._position(self.ranges[0][0])

    @property
    def scored_tokens(self) -> Range:
        """The positions of the tokens that are scored, which are one range."""
        ((start, stop),) = self.scored
        return self._position(start), self._position(stop)

    def _position(self, block: int) -> int:
        return int(self.rows[:block].sum())
