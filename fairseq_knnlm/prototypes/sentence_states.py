"""An LM's states as sentence embeddings: the mean over the words of a sentence of the state that has read them."""

import numpy as np
import torch

from ..data.sentences import Sentences
from ..keys import KeyExtractor, Model, key_dimension
from ..progress import progress

BATCH_TOKENS = 4096


@torch.no_grad()
def mean_states(model: Model, key: str, layer: int, sentences: Sentences, eos: int, pad: int) -> np.ndarray:
    """(n, dim) float32. A sentence is read alone, after the end of another, as in training with such lines."""
    extractor = KeyExtractor(model, key, layer)
    device = next(model.parameters()).device
    order = np.argsort(sentences.lengths, kind="stable")
    result = np.empty((len(order), key_dimension(model)), np.float32)
    start = 0
    with progress("embedding", len(order), " sentences") as bar:
        while start < len(order):
            width = int(sentences.lengths[order[start]])
            stop = start + max(1, BATCH_TOKENS // max(width, 1))
            numbers = order[start:stop]
            rows = sentences.rows(numbers)
            tokens = torch.from_numpy(rows.tokens.astype(np.int64))
            inputs = torch.cat([torch.full((len(tokens), 1), eos), tokens[:, :-1]], dim=1)
            # The state at position j has read the words up to j; the last input of a sentence is its last word.
            lengths = torch.from_numpy(rows.lengths.astype(np.int64))
            words = torch.arange(tokens.size(1))[None] < lengths[:, None]
            inputs = inputs.masked_fill(~words, pad)
            words[:, 0] = False
            states = extractor.run(model, {"src_tokens": inputs.to(device), "src_lengths": lengths.to(device)})
            weights = (words / words.sum(dim=1, keepdim=True)).to(states)
            result[numbers] = torch.einsum("btc,bt->bc", states, weights).float().cpu().numpy()
            start = stop
            bar.update(len(numbers))
    extractor.remove()
    return result
