"""The continuous cache (Grave et al. 2017): the last N tokens of the evaluated text as one more memory.

Token t is predicted from state h_t. Its cache holds the states and tokens of the positions before t, so

    p_cache(y) is proportional to the sum of exp(theta * h_t . h_i) over i in [t - N, t - 1] with token_i = y

Before the first token the cache is empty and its share of the mixture goes to no token.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .probs import neighbor_log_weights, target_log_probs

MAX_SIMILARITIES = 1 << 22  # of one matrix product: 16 MiB, which stays near the processor


class ContinuousCache:
    """Remembers the last ``size`` tokens and predicts the next one from them.

    Every token sees the positions before it and no other, whether they came in this call or in an earlier one, so how
    the text is cut into calls changes nothing.
    """

    def __init__(self, size: int, theta: float = 1.0, documents: "Documents | None" = None, position: int = 0):
        """
        Args:
            documents: forget what lies before the document that a token belongs to
            position: of the first token that will come, in the corpus
        """
        self.size, self.theta = size, theta
        self._documents, self._position = documents, position
        self._seen = 0
        self._states: Tensor | None = None  # (size, dim), oldest first; zeros where there is nothing yet
        self._tokens: Tensor | None = None  # (size,); -1 where there is nothing yet

    def target_log_probs(
        self, states: Tensor, tokens: Tensor, keep: Callable[[Tensor, Tensor], None] | None = None
    ) -> Tensor:
        """log p_cache of the next n tokens, which are then remembered.

        Args:
            states: (n, dim), what each token is predicted from
            tokens: (n,)
            keep: called for consecutive rows of the n with (similarities (rows, size), matches (rows, size)), the most
                recent position first, -inf where there is none

        Returns:
            (n,), -inf where the token is not in the cache
        """
        states, reach = states.float(), self._reach(len(tokens)).to(tokens.device)
        if self._states is None:
            self._states, self._tokens = states.new_zeros(self.size, states.size(1)), tokens.new_full((self.size,), -1)
        states, tokens = torch.cat([self._states, states]), torch.cat([self._tokens, tokens])
        log_probs = states.new_empty(len(reach))
        # A product of many rows has many columns that not all of them look at; one of few rows is slow.
        step = max(8, min(max(64, self.size // 4), MAX_SIMILARITIES // self.size))
        for start in range(0, len(reach), step):
            rows = slice(start, min(start + step, len(reach)))
            near, matches = self._window(states, tokens, rows, reach[rows])
            log_probs[rows] = target_log_probs(neighbor_log_weights(near, self.theta), matches)
            if keep is not None:
                keep(near, matches)
        self._states, self._tokens = states[-self.size :].clone(), tokens[-self.size :].clone()
        return log_probs

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
