"""Sentences that the editor writes: from prototypes and edit vectors, word by word."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.sentences import Sentences


@torch.no_grad()
def write_sentences(
    model: Any, prototypes: Tensor | None, edits: Tensor | None, longest: int, temperature: float = 0.0, count: int = 1
) -> list[list[int]]:
    """One sentence for each prototype (n, S) and edit vector (n, d), without its end.

    Args:
        temperature: 0 takes the most probable word each time, 1 draws from the editor's distribution
        count: how many, where there are no prototypes
    """
    model.eval()
    device = next(model.parameters()).device
    read = None if prototypes is None else model.editor.read(prototypes.to(device))
    edits = None if edits is None else edits.to(device)
    size = count if prototypes is None else len(prototypes)
    words = torch.full((size, 1), model.eos, device=device)
    ended = torch.zeros(size, dtype=torch.bool, device=device)
    for _ in range(longest):
        scores = model.editor.next_log_probs(words, read, edits)
        scores[:, model.pad] = -torch.inf
        if temperature > 0:
            chosen = torch.multinomial((scores / temperature).softmax(dim=-1), 1)[:, 0]
        else:
            chosen = scores.argmax(dim=-1)
        words = torch.cat([words, chosen.masked_fill(ended, model.eos)[:, None]], dim=1)
        ended |= chosen == model.eos
        if ended.all():
            break
    rows = words[:, 1:].tolist()
    return [row[: row.index(model.eos)] if model.eos in row else row for row in rows]


@torch.no_grad()
def edit_means(model: Any, prototypes: Sentences, sentences: Sentences) -> Tensor:
    """mu(t, x) of pairs, (n, d)."""
    model.eval()
    device = next(model.parameters()).device
    tokens = [torch.from_numpy(rows.tokens.astype(np.int64)).to(device) for rows in (prototypes, sentences)]
    return model.edit_encoder(*tokens)
