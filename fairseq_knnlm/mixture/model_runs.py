"""What the model gave for the tokens of a batch, and how the results of batches in lanes are put in order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .output_layer import TopTokens


@dataclass
class ModelRun:
    """What one batch gave; of its predicted positions only."""

    tokens: Tensor  # (n,)
    lm: Tensor  # (n,)
    queries: list[Tensor]  # (n, dim) of each memory
    features: Tensor | None  # (n, C)
    lm_features: Tensor  # (n, LM_FEATURES), or empty
    top: TopTokens | None = None  # the LM's most probable tokens, if asked for


def in_order(runs: list[ModelRun], order: Tensor) -> ModelRun:
    """The runs of batches in lanes as one, in corpus order."""

    def ordered(parts: list[Tensor]) -> Tensor:
        joined = torch.cat(parts)
        return joined[order.to(joined.device)] if len(joined) else joined

    features = [run.features for run in runs if run.features is not None]
    tops = [run.top for run in runs if run.top is not None]
    return ModelRun(
        ordered([run.tokens for run in runs]),
        ordered([run.lm for run in runs]),
        [ordered(list(parts)) for parts in zip(*(run.queries for run in runs))],
        ordered(features) if features else None,
        ordered([run.lm_features for run in runs]),
        TopTokens(*(ordered(list(parts)) for parts in zip(*tops))) if tops else None,
    )
