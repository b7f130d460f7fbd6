"""The mixture as a model: fairseq code that calls a language model gets the interpolated distribution from it."""

import time
from typing import Any

from fairseq.models import FairseqLanguageModel
from torch import Tensor

from ..keys import Model
from ..memory import DatastoreMemory
from .interpolation import interpolate


class KNNLanguageModel(FairseqLanguageModel):
    """A thin wrapper: everything is the model's own, except that probabilities are those of the mixture.

    Incremental decoding needs nothing more, because a key depends on the state of its own step alone.
    """

    def __init__(self, model: Model, memories: list[DatastoreMemory]):
        super().__init__(model.decoder)
        self.model, self.memories = model, memories
        self.search_seconds = 0.0
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, src_tokens: Tensor, **kwargs: Any) -> Any:
        return self.model(src_tokens, **kwargs)

    def get_normalized_probs(self, net_output: Any, log_probs: bool, sample: Any = None) -> Tensor:
        """(Log-)probabilities (B, T, vocabulary) for the output of the last forward pass, or its last positions."""
        lm = self.model.get_normalized_probs(net_output, log_probs=True, sample=sample)
        batch, length, vocabulary = lm.shape
        started = time.perf_counter()
        others = []
        for memory in self.memories:
            if memory.extractor is None:
                raise RuntimeError(f"the memory {memory.name} was opened without a model, so it knows no queries")
            queries = memory.extractor.peek()[:, -length:].reshape(batch * length, -1)
            others.append(memory.vocabulary_log_probs(queries, vocabulary).view(lm.shape).to(lm.device))
        self.search_seconds += time.perf_counter() - started
        self.steps += 1
        mixture = interpolate(lm, others, [memory.weight for memory in self.memories])
        return mixture if log_probs else mixture.exp()
