"""An n-gram LM with interpolated Kneser-Ney smoothing (Kneser and Ney 1995; Chen and Goodman 1999), in arrays."""

import numpy as np

BITS = 16  # of a token in an n-gram, which is one integer of 64 bits
MAX_ORDER = 64 // BITS


def ngrams(tokens: np.ndarray, order: int) -> np.ndarray:
    """tokens (n,) -> the n-grams that end with each but the first order - 1, the last token in the lowest bits."""
    count = len(tokens) - order + 1
    packed = np.zeros(max(0, count), np.uint64)
    for place in range(order):
        packed = packed << np.uint64(BITS) | tokens[place : place + len(packed)].astype(np.uint64)
    return packed


class _Order:
    """Counts of one order: of each n-gram, and how often and by how many different tokens its history goes on."""

    def __init__(self, grams: np.ndarray, counts: np.ndarray):
        """grams (m,) ascending and distinct, counts (m,)."""
        self.grams, self.counts = grams, counts
        self.histories, first = np.unique(grams >> np.uint64(BITS), return_index=True)
        self.totals = np.add.reduceat(counts, first)
        self.kinds = np.diff(first, append=len(grams))
        once, twice = (counts == 1).sum(), (counts == 2).sum()
        self.discount = once / (once + 2 * twice) if once else 0.5

    def smooth(self, wanted: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """wanted n-grams (n,), their probabilities in the next lower order (n,) -> those in this one."""
        count = _look_up(self.grams, self.counts, wanted)
        history = wanted >> np.uint64(BITS)
        total = _look_up(self.histories, self.totals, history)
        kinds = _look_up(self.histories, self.kinds, history)
        seen = np.maximum(total, 1)
        smoothed = (np.maximum(count - self.discount, 0) + self.discount * kinds * lower) / seen
        return np.where(total > 0, smoothed, lower)


class KneserNey:
    """log p of a token after order - 1 others."""

    def __init__(self, tokens: np.ndarray, order: int, vocabulary_size: int):
        if not 1 <= order <= MAX_ORDER or vocabulary_size > 1 << BITS:
            raise ValueError(f"at most {MAX_ORDER}-grams of {1 << BITS} types")
        self.order, self.vocabulary_size = order, vocabulary_size
        grams, counts = np.unique(ngrams(tokens, order), return_counts=True)
        self.orders = [_Order(grams, counts)]
        for lower in range(order - 1, 0, -1):
            # Below the highest order it counts after how many different tokens something comes, not how often.
            endings = grams & np.uint64((1 << BITS * lower) - 1)
            grams, counts = np.unique(endings, return_counts=True)
            self.orders.insert(0, _Order(grams, counts))

    def log_probs(self, tokens: np.ndarray) -> np.ndarray:
        """tokens (n,) -> (n,): of each after those before it; the first ones have shorter histories."""
        log_probs = np.empty(len(tokens))
        for position in range(min(self.order - 1, len(tokens))):
            log_probs[position] = self._log_probs(tokens[: position + 1], position + 1)[-1]
        log_probs[self.order - 1 :] = self._log_probs(tokens, self.order)
        return log_probs

    def _log_probs(self, tokens: np.ndarray, order: int) -> np.ndarray:
        count = max(0, len(tokens) - order + 1)
        probs = np.full(count, 1 / self.vocabulary_size)
        for length, level in enumerate(self.orders[:order], start=1):
            probs = level.smooth(ngrams(tokens, length)[order - length :], probs)
        return np.log(probs)


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The values of the wanted keys, 0 where there is none."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
