"""A learned head: log p of words for keys, from an output embedding or from clusters."""

import torch
from torch import Tensor

from .clusters import ClusterWords
from .rows import RowLayout
from .softmax import log_sum_of_rows, logits
from .trunks import NoTrunk, Trunk

KINDS = ("embedding", "mos", "clusters", "network")
LOGITS_AT_ONCE = 1 << 24  # of all rows, for some queries: 64 MiB


class Head:
    """P(y|h), with h as the keys of the datastore that it was learnt from.

    The rows are the output embedding, or the centroids of clusters; the trunk comes before them.
    """

    def __init__(
        self,
        rows: Tensor,
        words: RowLayout | ClusterWords,
        metric: str,
        temperature: float,
        trunk: Trunk | None = None,
        projection: Tensor | None = None,
    ):
        """
        Args:
            rows: (rows, dim)
            words: which word each row is of, or the words of each cluster
            projection: (dim, source dim), from the model's states to keys; None: they are the same
        """
        self.rows, self.words, self.metric, self.temperature = rows, words, metric, temperature
        self.trunk, self.projection = trunk or NoTrunk(), projection

    @property
    def vocabulary(self) -> int:
        return self.words.vocabulary if isinstance(self.words, ClusterWords) else len(self.words)

    def to(self, device: torch.device | str) -> "Head":
        projection = None if self.projection is None else self.projection.to(device)
        return Head(
            self.rows.to(device), self.words.to(device), self.metric, self.temperature, self.trunk.to(device),
            projection,
        )  # fmt: skip

    def project(self, states: Tensor) -> Tensor:
        """The model's states as keys: (n, source dim) -> (n, dim) float32."""
        states = states.float().to(self.rows.device)
        return states if self.projection is None else states @ self.projection.T

    @torch.no_grad()
    def target_log_probs(self, keys: Tensor, targets: Tensor) -> Tensor:
        """log p of the targets: keys (n, dim), targets (n,) -> (n,), -inf where p is 0."""
        step, found = self._keys_at_once(), [keys.new_empty(0)]
        for some, wanted in zip(keys.split(step), targets.split(step)):
            states, log_weights = self.trunk(some)
            parts = torch.stack([self._of_targets(state, wanted) for state in states], dim=1)
            found.append(parts[:, 0] if log_weights is None else (parts + log_weights).logsumexp(dim=1))
        return torch.cat(found)

    @torch.no_grad()
    def vocabulary_log_probs(self, keys: Tensor) -> Tensor:
        """log p of every word: keys (n, dim) -> (n, vocabulary), -inf where p is 0."""
        step, found = self._keys_at_once(), [keys.new_empty(0, self.vocabulary)]
        for some in keys.split(step):
            states, log_weights = self.trunk(some)
            parts = torch.stack([self._of_vocabulary(state) for state in states], dim=2)
            found.append(parts[:, :, 0] if log_weights is None else (parts + log_weights[:, None]).logsumexp(dim=2))
        return torch.cat(found)

    def _keys_at_once(self) -> int:
        return max(1, LOGITS_AT_ONCE // len(self.rows))

    def _of_targets(self, states: Tensor, targets: Tensor) -> Tensor:
        """states (n, dim), targets (n,) -> (n,)"""
        scores = logits(states, self.rows, self.metric, self.temperature)
        if isinstance(self.words, ClusterWords):
            return self.words.target_probabilities(scores.softmax(dim=1), targets).log()
        columns, missing = self.words.columns(targets[:, None])
        return log_sum_of_rows(scores, columns, missing)[:, 0] - scores.logsumexp(dim=1)

    def _of_vocabulary(self, states: Tensor) -> Tensor:
        """states (n, dim) -> (n, vocabulary)"""
        scores = logits(states, self.rows, self.metric, self.temperature)
        if isinstance(self.words, ClusterWords):
            return self.words.vocabulary_probabilities(scores.softmax(dim=1)).log()
        if self.words.is_single:
            return scores.log_softmax(dim=1)
        # In double precision nothing underflows that could matter, down to e^-745.
        shares = scores.double().softmax(dim=1)
        sums = shares.new_zeros(len(states), len(self.words)).index_add_(1, self.words.words, shares)
        return sums.log().float()
