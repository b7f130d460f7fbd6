"""The output embedding of a language model as one row per word, whatever its softmax is made of."""

import torch
from torch import Tensor

from .extractor import key_dimension
from .running import Model


@torch.no_grad()
def output_rows(model: Model) -> Tensor:
    """(vocabulary, dim): the scores of a state h are rows @ h.

    With an adaptive softmax, the rows of a tail are its words' own, through its projection, plus that of its class: a
    word's log-probability is that of its class plus that of the word in the class.
    """
    decoder = model.decoder
    device = next(model.parameters()).device
    units = torch.eye(key_dimension(model), device=device, dtype=next(model.parameters()).dtype)
    softmax = decoder.adaptive_softmax
    if softmax is None:
        return decoder.output_layer(units).T.float().cpu()
    model.eval()
    head = softmax.head(units).T  # the words of the head, then a class for each tail
    tails = len(softmax.tail)
    words = [head[: len(head) - tails]]
    for number, tail in enumerate(softmax.tail):
        words.append(tail(units).T + head[len(head) - tails + number])
    return torch.cat(words).float().cpu()
