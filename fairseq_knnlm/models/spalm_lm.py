"""SPALM: a Transformer-XL whose last state is mixed with retrieved tokens by a gate.

    m_t = sum_k softmax_k(y_k . h_t) y_k        y_k: embeddings of the K retrieved output tokens, the model's own
    g_t = sigmoid(W_g h_t)                      one value per dimension, or one for all
    z_t = (1 - g_t) * m_t + g_t * h_t           then the softmax, tied to the embeddings

h_t leaves a layer norm, so its length is about sqrt(C); an embedding begins with length 1, and so does m_t. A network
that is trained for long makes its embeddings longer. For a short training there are options that bring m_t to the
length of h_t; none of them is in the paper, and each is off unless it is asked for:

    --embedding-length L      embeddings begin with length L
    --neighbor-sum scaled     sqrt(C) m_t in place of m_t
    --neighbor-sum norm       a layer norm of m_t
    --gate-bias b             g_t = sigmoid(W_g h_t + b_g), where b_g begins with b: above 0, z_t begins near h_t
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Optional

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model, register_model_architecture
from torch import Tensor, nn

from ..errors import KnnlmError
from .transformer_xl import TransformerXLConfig, TransformerXLDecoder, TransformerXLLanguageModel, _help

if TYPE_CHECKING:
    GATE_CHOICES = str  # a class that is made when the program runs is no type
    SUM_CHOICES = str
else:
    GATE_CHOICES = ChoiceEnum(["vector", "scalar"])
    SUM_CHOICES = ChoiceEnum(["plain", "scaled", "norm"])


@dataclass
class SPALMConfig(TransformerXLConfig):
    neighbors_used: int = field(
        default=4, metadata=_help("K, how many of the retrieved tokens are read; 0 is the Transformer-XL")
    )
    gate: GATE_CHOICES = field(default="vector", metadata=_help("one gate value per dimension, or one for all"))
    neighbor_sum: SUM_CHOICES = field(
        default="plain",
        metadata=_help("the sum of the retrieved embeddings: as in the paper, times sqrt(--dim), or in a layer norm"),
    )
    gate_bias: Optional[float] = field(
        default=None, metadata=_help("a trained bias of the gate that begins so; 2 begins near h (default: no bias)")
    )
    neighbor_dropout: float = field(
        default=0.0, metadata=_help("in training, leave out each retrieved token with this probability")
    )


class SPALMDecoder(TransformerXLDecoder):
    """The Transformer-XL's decoder with one more step before the output layer."""

    def __init__(self, cfg: SPALMConfig, dictionary: Dictionary):
        super().__init__(cfg, dictionary)
        self.neighbors_used = cfg.neighbors_used
        self.neighbor_dropout, self.neighbor_sum = cfg.neighbor_dropout, str(cfg.neighbor_sum)
        if not 0 <= cfg.neighbor_dropout < 1:
            raise KnnlmError(f"--neighbor-dropout must be at least 0 and below 1, not {cfg.neighbor_dropout:g}")
        if cfg.neighbors_used:
            width = cfg.dim if str(cfg.gate) == "vector" else 1
            self.gate = nn.Linear(cfg.dim, width, bias=cfg.gate_bias is not None)
            if cfg.gate_bias is not None:
                nn.init.constant_(self.gate.bias, cfg.gate_bias)
            if self.neighbor_sum == "norm":
                self.neighbor_norm = nn.LayerNorm(cfg.dim)

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
        memory, _ = self.read_neighbors(states, neighbors)
        gate = self.gate_values(states)
        return memory + gate * (states - memory)

    def read_neighbors(self, states: Tensor, neighbors: Tensor) -> tuple[Tensor, Tensor]:
        """h (B, T, C), retrieved tokens (B, T, K) -> m (B, T, C), and the share of each token in it (B, T, K)."""
        absent = neighbors < 0
        if self.training and self.neighbor_dropout:
            absent = absent | (torch.rand(neighbors.shape, device=neighbors.device) < self.neighbor_dropout)
        retrieved = self.embed_tokens(neighbors.masked_fill(absent, self.dictionary.pad()).flatten(1))
        retrieved = retrieved.view(*neighbors.shape, -1)  # (B, T, K, C)
        scores = (retrieved @ states.unsqueeze(-1)).squeeze(-1)
        scores = scores.masked_fill(absent, torch.finfo(scores.dtype).min)
        shares = scores.softmax(dim=-1).masked_fill(absent, 0.0)  # a token may have no neighbour at all
        memory = (shares.unsqueeze(-2) @ retrieved).squeeze(-2)
        if self.neighbor_sum == "scaled":
            memory = self.embed_scale * memory
        elif self.neighbor_sum == "norm":
            memory = self.neighbor_norm(memory)
        return memory, shares

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


@register_model_architecture("spalm_lm", "spalm_lm_small_budget")
def spalm_lm_small_budget(args: Any) -> None:
    """2 layers of 128 with options for some thousands of updates: m_t in a layer norm, a gate that begins near h_t."""
    _default(args, layers=2, dim=128, heads=4, ffn_dim=512, neighbor_sum="norm", gate_bias=2.0)


@register_model_architecture("spalm_lm", "spalm_lm_tiny")
def spalm_lm_tiny(args: Any) -> None:
    """For tests and the demo."""
    _default(args, layers=2, dim=64, heads=2, ffn_dim=128)
