"""Of the LM's own distribution more than the target: its most probable tokens, and any tokens that are named."""

from typing import Any, NamedTuple

import torch
from fairseq.models.transformer import TransformerDecoderBase
from torch import Tensor

from .interpolation import log_mean


class TopTokens(NamedTuple):
    """The most probable tokens at n positions, the most probable first."""

    tokens: Tensor  # (n, k) int32
    probs: Tensor  # (n, k) float16, which is exact to one part in 2,000, or to 3e-8


def top_tokens(decoders: list[Any], states: list[Tensor], k: int, rows: int | None = None) -> TopTokens:
    """The k most probable tokens of a model, or of the mean of several.

    Args:
        states: (n, C) of each model, what its output layer sees
        rows: how many positions' logits may be in memory at once
    """
    parts = []
    for features in zip(*(own.split(rows or max(1, len(own))) for own in states)):
        log_probs = log_mean([all_log_probs(decoder, own) for decoder, own in zip(decoders, features)])
        values, tokens = log_probs.topk(k, dim=1)
        parts.append(TopTokens(tokens.int().cpu(), values.exp().half().cpu()))
    return TopTokens(torch.cat([part.tokens for part in parts]), torch.cat([part.probs for part in parts]))


def all_log_probs(decoder: TransformerDecoderBase, features: Tensor) -> Tensor:
    """log p_LM of every token: features (n, C) -> (n, vocabulary) float32."""
    if decoder.adaptive_softmax is None:
        return decoder.output_layer(features).float().log_softmax(dim=1)
    return decoder.adaptive_softmax.get_log_prob(features[None], None)[0].float()


def log_probs_of(decoder: TransformerDecoderBase, features: Tensor, tokens: Tensor) -> Tensor:
    """log p_LM of some tokens at each position: features (n, C), tokens (n, k) -> (n, k) float32, with gradients.

    An adaptive softmax needs its head, and each tail only where one of the tokens lies in it.
    """
    if decoder.adaptive_softmax is None:
        return decoder.output_layer(features).float().log_softmax(dim=1).gather(1, tokens)
    softmax = decoder.adaptive_softmax
    features = softmax.dropout_module(features)  # as the softmax itself does when it is trained
    head = softmax.head(features).float().log_softmax(dim=1)  # (n, most frequent words, then a column for each tail)
    bands = torch.bucketize(tokens, tokens.new_tensor(softmax.cutoff), right=True)  # 0: in the head
    columns = torch.where(bands == 0, tokens, softmax.cutoff[0] + bands - 1)
    log_probs = head.gather(1, columns)
    for band, tail in enumerate(softmax.tail, start=1):
        rows, places = (bands == band).nonzero(as_tuple=True)
        if not len(rows):
            continue
        needed, row_numbers = rows.unique(return_inverse=True)
        within = tail(features[needed]).float().log_softmax(dim=1)
        found = within[row_numbers, tokens[rows, places] - softmax.cutoff[band - 1]]
        log_probs = log_probs.index_put((rows, places), found, accumulate=True)
    return log_probs
