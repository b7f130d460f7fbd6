"""The continuous cache (Grave et al. 2017): the last N tokens of the evaluated text as one more memory.

Token t is predicted from state h_t. Its cache holds the states and tokens of the positions before t, so

    p_cache(y) is proportional to the sum of exp(theta * h_t . h_i) over i in [t - N, t - 1] with token_i = y

Before the first token the cache is empty and its share of the mixture goes to no token.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..keys import KeyExtractor
from .base import KeptNeighbors, Memory, MemoryFacts, MemoryScores
from .features import PROFILE, neighbor_features
from .probabilities import neighbor_log_weights, target_log_probs, vocabulary_log_probs

MAX_SIMILARITIES = 1 << 22  # of one matrix product: 16 MiB, which stays near the processor


class ContinuousCache(Memory):
    """Remembers the last ``size`` tokens and predicts the next one from them.

    Every token sees the positions before it and no other, whether they came in this call or in an earlier one, so how
    the text is cut into calls changes nothing.
    """

    title = "in the cache"

    def __init__(
        self,
        size: int,
        theta: float = 1.0,
        documents: "Documents | None" = None,
        position: int = 0,
        weight: float = 0.0,
        extractor: KeyExtractor | None = None,
        identity: dict[str, Any] | None = None,
    ):
        """
        Args:
            documents: forget what lies before the document that a token belongs to
            position: of the first token that will come, in the corpus
            weight: lambda
            identity: what decides its similarities, for a saved run
        """
        self.size, self.theta, self.weight, self.extractor = size, theta, weight, extractor
        self.identity = identity or {}
        self._documents, self._position = documents, position
        self._seen = 0
        self._states: Tensor | None = None  # (size, dim), oldest first; zeros where there is nothing yet
        self._tokens: Tensor | None = None  # (size,); -1 where there is nothing yet

    @property
    def facts(self) -> MemoryFacts:
        return MemoryFacts("cache", self.size, self.weight, self.theta, self.identity)

    def scores_in_parts(self, queries: Tensor, targets: Tensor, keep: bool = False) -> Iterator[MemoryScores]:
        """Scores of the next n tokens, which are then remembered.

        Args:
            queries: (n, dim), the states that each token is predicted from
            targets: (n,), the tokens
            keep: whether to return similarities and matches, (rows, size) each, the most recent position first
        """
        states, tokens, reach = queries.float(), targets, self._reach(len(targets)).to(targets.device)
        if self._states is None or self._tokens is None:
            self._states, self._tokens = states.new_zeros(self.size, states.size(1)), tokens.new_full((self.size,), -1)
        states, tokens = torch.cat([self._states, states]), torch.cat([self._tokens, tokens])
        # A product of many rows has many columns that not all of them look at; one of few rows is slow.
        step = max(8, min(max(64, self.size // 4), MAX_SIMILARITIES // self.size))
        for start in range(0, len(reach), step):
            rows = slice(start, min(start + step, len(reach)))
            near, matches = self._window(states, tokens, rows, reach[rows])
            log_probs = target_log_probs(neighbor_log_weights(near, self.theta), matches)
            scores = MemoryScores(log_probs, kept=KeptNeighbors(near, matches) if keep else None)
            if self.with_features:
                scores.features = neighbor_features(near, [self.theta * factor for factor in PROFILE])
            yield scores
        self._states, self._tokens = states[-self.size :].clone(), tokens[-self.size :].clone()

    def vocabulary_log_probs(self, queries: Tensor, vocabulary_size: int) -> Tensor:
        """The distribution of the next token, for each query as if it were the state at the next position.

        Nothing is remembered: the token that comes is not known yet.
        """
        if self._states is None or self._tokens is None:
            return torch.full((len(queries), vocabulary_size), -math.inf, device=queries.device)
        seen, position = self._seen, self._position
        reach = int(self._reach(1))
        self._seen, self._position = seen, position  # looking ahead moves nothing
        past = slice(max(0, self.size - reach), self.size)
        near = queries.float() @ self._states[past].T
        values = self._tokens[past].expand(len(queries), -1)
        return vocabulary_log_probs(neighbor_log_weights(near, self.theta), values, vocabulary_size)

    def _reach(self, count: int) -> Tensor:
        """How far back each of the next tokens may look, (n,)."""
        reach = np.arange(self._seen, self._seen + count)
        self._seen += count
        if self._documents is not None:
            positions = np.arange(self._position, self._position + count)
            reach = np.minimum(reach, positions - self._documents.start_of(positions))
        self._position += count
        return torch.from_numpy(reach)

    def _window(self, states: Tensor, tokens: Tensor, rows: slice, reach: Tensor) -> tuple[Tensor, Tensor]:
        """Similarities and matches of some rows with the ``size`` positions before each, both (rows, size).

        Row r of the product has its window in columns r .. r + size - 1; latest first, that is a matrix whose rows
        start one column earlier each, which a stride can say without a copy.
        """
        count = rows.stop - rows.start
        queries = slice(rows.start + self.size, rows.stop + self.size)
        past = slice(rows.start, rows.stop + self.size - 1)
        products = states[queries] @ states[past].flip(0).T  # (count, size + count - 1), latest first
        equal = tokens[queries][:, None] == tokens[past].flip(0)
        shape, strides, offset = (count, self.size), (products.size(1) - 1, 1), count - 1
        near, matches = (matrix.as_strided(shape, strides, offset) for matrix in (products, equal))
        absent = torch.arange(1, self.size + 1, device=reach.device) > reach[:, None]
        return near.masked_fill(absent, -math.inf), matches & ~absent


class Documents:
    """Where documents begin, as far as a reader of the text can know.

    A boundary line (a title, say) ends one document and begins the next. That it is one shows when it has been read:
    its own tokens still see the old document, and those after it see everything from its first token on.
    """

    def __init__(self, line_sizes: np.ndarray, is_boundary: np.ndarray):
        """line_sizes (lines,): tokens of each line; is_boundary (lines,): whether it begins a document."""
        ends = np.cumsum(line_sizes, dtype=np.int64)
        self._known_from = ends[is_boundary]
        self._starts = (ends - line_sizes)[is_boundary]

    def start_of(self, positions: np.ndarray) -> np.ndarray:
        """The first position of the document that each position belongs to: (n,) -> (n,)."""
        number = np.searchsorted(self._known_from, positions, side="right") - 1
        return np.where(number >= 0, self._starts[number], 0) if len(self._starts) else np.zeros_like(positions)
