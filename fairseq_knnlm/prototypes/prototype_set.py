"""The prototypes that a model may edit: all of the training sentences, or the few that hold the mass."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..data.sentences import Sentences
from .dirichlet import PrototypePrior


@dataclass
class PrototypeSet:
    """k prototypes with what retrieval needs to know of them."""

    sentences: Sentences
    embeddings: Tensor  # (k, d) float32
    log_prior: Tensor  # (k,) float64: log p(t)
    numbers: np.ndarray  # (k,) their numbers in the training text

    def __len__(self) -> int:
        return len(self.sentences)

    @property
    def nbytes(self) -> int:
        """What has to be kept to edit them: tokens, embeddings and probabilities."""
        return self.sentences.nbytes + sum(array.numel() * array.element_size() for array in self._tensors())

    def _tensors(self) -> tuple[Tensor, Tensor]:
        return self.embeddings, self.log_prior


def select_prototypes(
    sentences: Sentences, embeddings: Tensor, prior: PrototypePrior, count: int | None = None
) -> PrototypeSet:
    """All prototypes, or the ``count`` with the most mass, whose probabilities are made to sum to one again."""
    log_prior = prior.log_mean().cpu()
    if count is None:
        return PrototypeSet(sentences, embeddings, log_prior, np.arange(len(sentences)))
    kept = prior.best(count).cpu()
    weights = log_prior[kept]
    numbers = kept.numpy()
    return PrototypeSet(
        sentences.rows(numbers), embeddings[kept.to(embeddings.device)].clone(),
        weights - torch.logsumexp(weights, dim=0), numbers,
    )  # fmt: skip
