"""Softmaxes over the rows of an output embedding: over all rows, or an estimate from some of them.

log p(y|h) = log of the sum over the rows r of y of softmax_r(score(h, r) / T); score is the inner product h.r or the
negative squared distance -|h - r|^2, whose -|h|^2 all rows have in common.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .rows import RowLayout


def logits(states: Tensor, rows: Tensor, metric: str, temperature: float, offsets: Tensor | None = None) -> Tensor:
    """Scores divided by T, without what all rows have in common: states (n, dim), rows (r, dim) -> (n, r).

    Args:
        offsets: (n, r) or (r,), added
    """
    scale = (1.0 if metric == "ip" else 2.0) / temperature
    if metric == "l2":
        bias = rows.square().sum(dim=1) * (-1 / temperature)
        offsets = bias if offsets is None else offsets + bias
    scaled = states * scale
    return scaled @ rows.T if offsets is None else torch.addmm(offsets, scaled, rows.T)


class _RowLogProbs(torch.autograd.Function):
    """log p of words from states and rows, with a gradient that needs no more memory than the logits themselves."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor, offsets: Tensor | None, *place: Tensor | None) -> Tensor:
        """states (n, d), rows (r, d), offsets (n, r), columns and missing (n, k, most) -> (n, k)."""
        columns, missing = place
        assert columns is not None
        scores = states @ rows.T if offsets is None else torch.addmm(offsets, states, rows.T)
        of_words = log_sum_of_rows(scores, columns, missing)
        total = scores.logsumexp(dim=1, keepdim=True)
        ctx.save_for_backward(states, rows, scores, columns, missing, of_words, total)
        return of_words - total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, rows, scores, columns, missing, of_words, total = ctx.saved_tensors
        (gradient,) = gradients  # (n, k)
        of_own = gradient[:, :, None].expand(columns.shape)
        if missing is not None:
            shares = (scores.gather(1, columns.flatten(1)).view(columns.shape) - of_words[:, :, None]).exp()
            of_own = of_own * shares.masked_fill(missing, 0.0)
        # The logits become their own gradient in place: nobody asks for them again.
        of_scores = scores.sub_(total).exp_().mul_(-gradient.sum(dim=1, keepdim=True))
        of_scores.scatter_add_(1, columns.flatten(1), of_own.flatten(1))
        of_states = of_scores @ rows if ctx.needs_input_grad[0] else None
        of_rows = of_scores.T @ states if ctx.needs_input_grad[1] else None
        return of_states, of_rows, None, None, None


def row_log_probs(
    states: Tensor, rows: Tensor, metric: str, temperature: float, offsets: Tensor | None,
    columns: Tensor, missing: Tensor | None,
) -> Tensor:  # fmt: skip
    """log p of words, for training: states (n, dim), rows (r, dim) -> (n, k).

    Args:
        offsets: (n, r), see ``Candidates``; None: the rows are all there are
        columns, missing: (n, k, most), the rows of each example's words, see ``RowLayout.columns``
    """
    states = states * ((1.0 if metric == "ip" else 2.0) / temperature)
    if metric == "l2":  # -|r|^2 as one more dimension
        states = torch.cat([states, states.new_ones(len(states), 1)], dim=1)
        rows = torch.cat([rows, rows.square().sum(dim=1, keepdim=True) * (-1 / temperature)], dim=1)
    return _RowLogProbs.apply(states, rows, offsets, columns, missing)


def log_sum_of_rows(values: Tensor, columns: Tensor, missing: Tensor | None) -> Tensor:
    """Log of the sum over each word's rows: values (n, r), columns (n, w, most) -> (n, w)."""
    found = values.gather(1, columns.flatten(1)).view(columns.shape)
    if missing is None:
        return found.squeeze(-1)
    return found.masked_fill(missing, -torch.inf).logsumexp(dim=-1)


@dataclass
class Candidates:
    """Some rows that stand for all of them in one step of training.

    A row that others brought in counts 1 / (its chance to be here), which makes the estimated sum over all rows right
    on average (Horvitz and Thompson); the rows of an example's own words are certain to be here, and count 1. Words
    that are here for the sake of other examples alone count nothing.
    """

    rows: Tensor  # (c,) which
    layout: RowLayout  # of the candidate words, in the order of ``rows``
    words: Tensor  # (w,) which words, ascending
    log_weights: Tensor  # (c,) -log of the chance; -inf: only of use to those that own it

    def columns(self, own: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where the rows of words stand: own (n, k) words -> (n, k, most), and which of these are missing."""
        return self.layout.columns(torch.searchsorted(self.words, own))

    def offsets(self, columns: Tensor) -> Tensor:
        """What to add to the logits of each example: (n, k, most) -> (n, c)."""
        offsets = self.log_weights.expand(len(columns), -1).clone()
        return offsets.scatter_(1, columns.flatten(1), 0.0)


class Sampler:
    """Draws the candidates of a step: the words of the batch, and negatives that all its examples share.

    Negatives are drawn with probabilities proportional to frequency to the power of 3/4, so that frequent words, which
    have most of the mass, are nearly always here.
    """

    def __init__(self, layout: RowLayout, frequencies: np.ndarray, batch: int, negatives: int, seed: int):
        """
        Args:
            frequencies: (V,) of each word in the datastore
            batch: examples in a step
            negatives: words drawn in a step, with replacement
        """
        self._layout, self._negatives, self._seed = layout, negatives, seed
        shares = frequencies / max(1, frequencies.sum())
        drawn = (frequencies + 1.0) ** 0.75
        drawn /= drawn.sum()
        self._cumulative = np.cumsum(drawn)
        # To be here, a word has to be the target of another example, or to be drawn.
        absent = (batch - 1) * np.log1p(-np.minimum(shares, 0.999999)) + negatives * np.log1p(-drawn)
        self._log_weights = torch.from_numpy(-np.log(-np.expm1(absent))).float()

    def draw(self, step: int, targets: Tensor, others: Tensor | None = None) -> Candidates:
        """The candidates of a step, the same whenever it is done.

        Args:
            targets: (n,) words
            others: (n, k) words that an example needs besides
        """
        rng = np.random.default_rng([self._seed, step])
        drawn = np.searchsorted(self._cumulative, rng.random(self._negatives), side="right")
        drawn = np.minimum(drawn, len(self._cumulative) - 1)
        words = torch.cat([targets, torch.from_numpy(drawn)]).unique()
        log_weights = self._log_weights[words]
        if others is not None:
            everyone = torch.cat([words, others.flatten()]).unique()
            known = torch.isin(everyone, words, assume_unique=True)
            log_weights = torch.full((len(everyone),), -torch.inf).masked_scatter_(known, log_weights)
            words = everyone
        counts = self._layout.counts[words]
        layout = RowLayout(counts)
        rows = torch.arange(layout.total) - layout.starts[layout.words] + self._layout.starts[words][layout.words]
        return Candidates(rows, layout, words, log_weights[layout.words])
