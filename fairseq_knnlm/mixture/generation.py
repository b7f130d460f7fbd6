"""The mixture as a model: fairseq code that calls a language model gets the interpolated distribution from it."""

import time
from typing import Any

from fairseq.models import FairseqLanguageModel
from torch import Tensor

from ..keys import Model
from ..memory import Memory
from .gate import Gate
from .interpolation import interpolate, interpolate_by_token
from .lm_features import certainty_of_output, with_last_token


class KNNLanguageModel(FairseqLanguageModel):
    """A thin wrapper: everything is the model's own, except that probabilities are those of the mixture.

    Incremental decoding needs nothing more, because a key depends on the state of its own step alone.
    """

    def __init__(self, model: Model, memories: list[Memory], gate: Gate | None = None):
        super().__init__(model.decoder)
        self.model, self.memories, self.gate = model, memories, gate
        self._last_tokens: Tensor | None = None  # (B, T) that the last forward pass has read, for a gate
        if gate is not None:
            self._watch_decoder()
        self.search_seconds = 0.0
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def _watch_decoder(self) -> None:
        """Notice which tokens the decoder reads. A generator calls its ``forward`` itself, past every hook."""
        forward = self.model.decoder.forward

        def noticed(tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._last_tokens = tokens
            return forward(tokens, *args, **kwargs)

        self.model.decoder.forward = noticed

    def forward(self, src_tokens: Tensor, **kwargs: Any) -> Any:
        return self.model(src_tokens, **kwargs)

    def get_normalized_probs(self, net_output: Any, log_probs: bool, sample: Any = None) -> Tensor:
        """(Log-)probabilities (B, T, vocabulary) for the output of the last forward pass, or its last positions."""
        lm = self.model.get_normalized_probs(net_output, log_probs=True, sample=sample)
        batch, length, vocabulary = lm.shape
        started = time.perf_counter()
        others, features = [], []
        for memory in self.memories:
            if memory.extractor is None:
                raise RuntimeError(f"the memory {memory.title} was opened without a model, so it knows no queries")
            queries = memory.extractor.peek()[:, -length:].reshape(batch * length, -1)
            scores = memory.vocabulary_scores(queries, vocabulary)
            others.append(scores.log_probs.to(lm.device))
            features.append(scores.features or {})
        self.search_seconds += time.perf_counter() - started
        self.steps += 1
        flat = lm.view(batch * length, vocabulary)
        if self.gate is None:
            mixture = interpolate(flat, others, [memory.weight for memory in self.memories])
        else:
            log_weights = self.gate.log_weights(self._lm_features(net_output[0], length), features)
            mixture = interpolate_by_token(flat, others, log_weights)
        mixture = mixture.view(lm.shape)
        return mixture if log_probs else mixture.exp()

    def _lm_features(self, output: Tensor, length: int) -> Tensor:
        """What a gate looks at of the LM, for the last ``length`` positions of each row: (B * length, LM_FEATURES)."""
        assert self._last_tokens is not None  # a forward pass comes first
        certainties = certainty_of_output(self.model.decoder, output[:, -length:].reshape(-1, output.size(-1)))
        return with_last_token(certainties, self._last_tokens[:, -length:].reshape(-1))
