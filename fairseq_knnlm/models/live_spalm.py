"""SPALM, or the Transformer-XL, as fairseq's generator wants a model: the whole text so far in, the next token out.

The states of the network do not depend on what was retrieved, so only the last position has to be searched for. The
network reads the text in segments with its memory, as it does in scoring; what it has read is read again for each
token, because hypotheses change places between steps.
"""

import sys
import time
from typing import Any, Protocol

import numpy as np
import torch
from fairseq.models import FairseqDecoder, FairseqLanguageModel
from torch import Tensor

from .spalm_lm import SPALMDecoder
from .transformer_xl import TransformerXLDecoder

TEXT = "the text that is being generated"  # names the memory that the decoder keeps of it


class Retrieved(Protocol):
    """What is used of the neighbours of some positions."""

    tokens: np.ndarray  # (n, k), -1 where there are fewer


class Retrieval(Protocol):
    """Who finds the neighbours of the token that follows each row."""

    def of_next(self, source: Tensor) -> Retrieved: ...


class LiveDecoder(FairseqDecoder):
    """One step: tokens (B, n) -> the output layer's input or logits (B, 1, *)."""

    def __init__(self, decoder: TransformerXLDecoder, neighbors: Retrieval | None, segment: int):
        super().__init__(decoder.dictionary)
        self.decoder, self.neighbors, self.segment = decoder, neighbors, segment
        self.search_seconds, self.steps = 0.0, 0

    def forward(self, tokens: Tensor, encoder_out: Any = None, **_: Any) -> tuple[Tensor, dict]:
        states = read_segments(self.decoder, tokens, self.segment)[:, -1:]
        self.steps += 1
        if self.neighbors is not None and isinstance(self.decoder, SPALMDecoder):
            started = time.perf_counter()
            found = torch.from_numpy(self.neighbors.of_next(tokens).tokens)[:, None].to(tokens.device)
            self.search_seconds += time.perf_counter() - started
            states = self.decoder.mix(states, found)
        return self.decoder.output_layer(states), {"attn": [None]}

    def get_normalized_probs(self, net_output: Any, log_probs: bool, sample: Any = None) -> Tensor:
        return self.decoder.get_normalized_probs(net_output, log_probs, sample)

    def max_positions(self) -> int:
        return sys.maxsize


class LiveSPALM(FairseqLanguageModel):
    """The model that ``fairseq-interactive --task spalm`` generates with."""

    def __init__(self, model: FairseqLanguageModel, neighbors: Retrieval | None, segment: int):
        super().__init__(LiveDecoder(model.decoder, neighbors, segment))


def read_segments(decoder: TransformerXLDecoder, tokens: Tensor, segment: int, everything: bool = False) -> Tensor:
    """The states h of the last segment of each row, read as scoring reads: tokens (B, n) -> (B, last, C).

    Args:
        everything: of all segments, (B, n, C)
    """
    last = (tokens.size(1) - 1) // segment
    first = 0 if everything else max(0, last - -(-decoder.reach(segment) // segment))
    states = []
    for step, number in enumerate(range(first, last + 1)):
        part = tokens[:, number * segment : (number + 1) * segment]
        states.append(TransformerXLDecoder.extract_features(decoder, part, TEXT, step))
    return torch.cat(states, dim=1) if everything else states[-1]
