"""What a gate may look at of the LM: how sure it is, as far as that costs nothing, and how common the last token is."""

from typing import Any

import torch
from torch import Tensor

# The largest log-probability and the entropy, in nats, of the output layer: of an adaptive softmax its head alone, the
# frequent words and one class for each band of the others. And the logarithm of the last token's number, which is its
# rank by frequency in a dictionary of fairseq.
LM_FEATURES = ("largest", "entropy", "last token")


def certainty(logits: Tensor) -> Tensor:
    """Of logits (n, classes): largest log-probability and entropy, (n, 2) float32."""
    log_probs = logits.float().log_softmax(dim=1)
    return torch.stack([log_probs.amax(dim=1), -(log_probs.exp() * log_probs).sum(dim=1)], dim=1)


def certainty_of_output(decoder: Any, output: Tensor) -> Tensor:
    """The same of what a decoder returned: logits (n, classes), or features (n, C) before an adaptive softmax."""
    return certainty(output if decoder.adaptive_softmax is None else decoder.adaptive_softmax.head(output))


def with_last_token(certainties: Tensor, last_tokens: Tensor) -> Tensor:
    """LM_FEATURES: certainties (n, 2), last tokens (n,) -> (n, 3)."""
    return torch.cat([certainties, last_tokens.float().clamp(min=1).log()[:, None].to(certainties)], dim=1)
