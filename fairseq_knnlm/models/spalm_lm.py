"""SPALM: a Transformer-XL whose last state is mixed with retrieved tokens by a gate.

    m_t = sum_k softmax_k(y_k . h_t) y_k        y_k: embeddings of the K retrieved output tokens, the model's own
    g_t = sigmoid(W_g h_t)                      one value per dimension, or one for all
    z_t = (1 - g_t) * m_t + g_t * h_t           then the softmax, tied to the embeddings
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model, register_model_architecture
from torch import Tensor, nn

from ..errors import KnnlmError
from .transformer_xl import TransformerXLConfig, TransformerXLDecoder, TransformerXLLanguageModel, _help

if TYPE_CHECKING:
    GATE_CHOICES = str  # a class that is made when the program runs is no type
else:
    GATE_CHOICES = ChoiceEnum(["vector", "scalar"])


@dataclass
class SPALMConfig(TransformerXLConfig):
    neighbors_used: int = field(
        default=4, metadata=_help("K, how many of the retrieved tokens are read; 0 is the Transformer-XL")
    )
    gate: GATE_CHOICES = field(default="vector", metadata=_help("one gate value per dimension, or one for all"))


class SPALMDecoder(TransformerXLDecoder):
    """The Transformer-XL's decoder with one more step before the output layer."""

    def __init__(self, cfg: SPALMConfig, dictionary: Dictionary):
        super().__init__(cfg, dictionary)
        self.neighbors_used = cfg.neighbors_used
        if cfg.neighbors_used:
            self.gate = nn.Linear(cfg.dim, cfg.dim if str(cfg.gate) == "vector" else 1, bias=False)

    def extract_features(
        self, src_tokens: Tensor, text: str | None = None, step: int = 0, neighbors: Tensor | None = None
    ) -> Tensor:
        """
        Args:
            neighbors: (B, T, K) retrieved tokens, -1 where there is none
        """
        states = super().extract_features(src_tokens, text, step)
        if not self.neighbors_used:
            return states
        if neighbors is None:
            raise KnnlmError("SPALM needs the retrieved tokens of the text; run knnlm neighbors, then give --neighbors")
        return self.mix(states, neighbors[:, :, : self.neighbors_used])

    def mix(self, states: Tensor, neighbors: Tensor) -> Tensor:
        """h (B, T, C), retrieved tokens (B, T, K) -> z (B, T, C)."""
        absent = neighbors < 0
        retrieved = self.embed_tokens(neighbors.masked_fill(absent, self.dictionary.pad()).flatten(1))
        retrieved = retrieved.view(*neighbors.shape, -1)  # (B, T, K, C)
        scores = (retrieved @ states.unsqueeze(-1)).squeeze(-1)
        scores = scores.masked_fill(absent, torch.finfo(scores.dtype).min)
        shares = scores.softmax(dim=-1).masked_fill(absent, 0.0)  # a token may have no neighbour at all
        memory = (shares.unsqueeze(-2) @ retrieved).squeeze(-2)
        gate = self.gate_values(states)
        return memory + gate * (states - memory)

    def gate_values(self, states: Tensor) -> Tensor:
        """h (B, T, C) -> g (B, T, C), or (B, T, 1) for a scalar gate."""
        return torch.sigmoid(self.gate(states))


@register_model("spalm_lm", dataclass=SPALMConfig)
class SPALM(TransformerXLLanguageModel):
    """Semi-parametric language model."""

    @classmethod
    def build_model(cls, cfg: SPALMConfig, task: Any) -> "SPALM":
        return cls(SPALMDecoder(cfg, task.target_dictionary))


def _default(args: Any, **values: Any) -> None:
    """What the command line did not say."""
    for name, value in values.items():
        setattr(args, name, getattr(args, name, value))


@register_model_architecture("spalm_lm", "spalm_lm_wiki103")
def spalm_lm_wiki103(args: Any) -> None:
    """18 layers of 512, 8 heads: the paper's WikiText-103 model."""
    _default(args, layers=18, dim=512, heads=8, ffn_dim=2048, neighbors_used=4)


@register_model_architecture("spalm_lm", "spalm_lm_enwik8")
def spalm_lm_enwik8(args: Any) -> None:
    """24 layers: the paper's character model."""
    _default(args, layers=24, dim=512, heads=8, ffn_dim=2048, neighbors_used=2)


@register_model_architecture("spalm_lm", "spalm_lm_tiny")
def spalm_lm_tiny(args: Any) -> None:
    """For tests and the demo."""
    _default(args, layers=2, dim=64, heads=2, ffn_dim=128)
