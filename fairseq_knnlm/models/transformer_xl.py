"""A Transformer-XL language model for fairseq: segments in sequence, each with the states of those before it."""

import math
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqDecoder, FairseqLanguageModel, register_model
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from omegaconf import II
from torch import Tensor, nn

from ..errors import KnnlmError
from .relative_attention import RelativeAttention, future_positions, relative_positions


def _help(text: str) -> dict:
    return {"help": text}


@dataclass
class TransformerXLConfig(FairseqDataclass):
    layers: int = field(default=18, metadata=_help("decoder layers"))
    dim: int = field(default=512, metadata=_help("width of the network and of the embeddings"))
    heads: int = field(default=8, metadata=_help("attention heads"))
    ffn_dim: int = field(default=2048, metadata=_help("width of the feed-forward layers"))
    dropout: float = field(default=0.1, metadata=_help("dropout"))
    attention_dropout: float = field(default=0.0, metadata=_help("dropout of the attention's shares"))
    memory_size: int = field(default=512, metadata=_help("states of each layer that the next segment sees"))
    adaptive_cutoff: Optional[str] = field(
        default=None, metadata=_help("comma-separated cutoffs: adaptive input and softmax with tied weights")
    )
    adaptive_factor: float = field(default=4.0, metadata=_help("how much narrower each next band is"))
    embedding_length: float = field(
        default=1.0, metadata=_help("length that embeddings begin with; what the layers read of them stays the same")
    )
    tokens_per_sample: int = II("task.tokens_per_sample")


class Lanes:
    """The memory of texts that are read in parallel, one segment after the other.

    A segment that does not follow the last one of its text (the first of an epoch, or the first after a restart)
    begins with an empty memory. Each text (a split) has a memory of its own, so validating in between does not disturb
    training. A row is padded only behind the end of its lane, where nothing follows, so no padding is ever looked at.
    """

    def __init__(self) -> None:
        self._memory: dict[str, tuple[int, Tensor]] = {}

    def get(self, text: str | None, step: int, layers: int, like: Tensor) -> Tensor:
        """States (layers, B, M, C) for a segment like (B, T, C). A text without a name has no memory."""
        batch, _, dim = like.shape
        remembered = None if text is None else self._memory.get(text)
        if remembered is not None:
            expected, states = remembered
            if step == expected and states.size(1) == batch:
                return states.to(like)
        return like.new_zeros(layers, batch, 0, dim)

    def put(self, text: str, step: int, states: Tensor) -> None:
        self._memory[text] = (step + 1, states.detach())


class TransformerXLLayer(nn.Module):
    """Attention and feed-forward, each after a layer norm and around a residual connection."""

    normalize_before = True

    def __init__(self, cfg: TransformerXLConfig):
        super().__init__()
        self.dropout = cfg.dropout
        self.self_attn_layer_norm = nn.LayerNorm(cfg.dim)
        self.self_attn = RelativeAttention(cfg.dim, cfg.heads, cfg.attention_dropout)
        self.final_layer_norm = nn.LayerNorm(cfg.dim)
        self.fc1 = nn.Linear(cfg.dim, cfg.ffn_dim)
        self.fc2 = nn.Linear(cfg.ffn_dim, cfg.dim)

    def forward(self, states: Tensor, memory: Tensor, positions: Tensor, future: Tensor) -> Tensor:
        """states (B, T, C), memory (B, M, C) -> (B, T, C)."""
        # The memory first: a key is taken from the last call of the norm, which must be that of the segment.
        remembered, normed = self.self_attn_layer_norm(memory), self.self_attn_layer_norm(states)
        attended = self.self_attn(normed, remembered, positions, future)
        states = states + F.dropout(attended, self.dropout, self.training)
        inner = F.dropout(F.relu(self.fc1(self.final_layer_norm(states))), self.dropout, self.training)
        return states + F.dropout(self.fc2(inner), self.dropout, self.training)


class TransformerXLDecoder(FairseqDecoder):
    """Embeddings, layers with memory, and an output layer tied to the embeddings."""

    batch_first = True  # states are B x T x C, in fairseq's own decoders T x B x C
    separate_output_layer = True

    def __init__(self, cfg: TransformerXLConfig, dictionary: Dictionary):
        super().__init__(dictionary)
        if cfg.dim % cfg.heads or cfg.dim % 2:
            raise KnnlmError(f"--dim {cfg.dim} must be even and a multiple of --heads {cfg.heads}")
        self.cfg, self.embed_dim, self.memory_size = cfg, cfg.dim, cfg.memory_size
        self.dropout = cfg.dropout
        self.embed_scale = math.sqrt(cfg.dim)
        self.lanes = Lanes()
        padding = dictionary.pad()
        self.adaptive_softmax = None
        if cfg.adaptive_cutoff:
            cutoffs = [int(cutoff) for cutoff in cfg.adaptive_cutoff.split(",")]
            self.embed_tokens = AdaptiveInput(
                len(dictionary), padding, cfg.dim, cfg.adaptive_factor, cfg.dim, cutoffs
            )
            self.adaptive_softmax = AdaptiveSoftmax(
                len(dictionary), cfg.dim, cutoffs, dropout=0.0, adaptive_inputs=self.embed_tokens,
                factor=cfg.adaptive_factor, tie_proj=True,
            )  # fmt: skip
        else:
            self.embed_tokens = nn.Embedding(len(dictionary), cfg.dim, padding)
            nn.init.normal_(self.embed_tokens.weight, std=cfg.dim**-0.5)
            nn.init.zeros_(self.embed_tokens.weight[padding])
        self._lengthen_embeddings(cfg.embedding_length)
        self.layers = nn.ModuleList(TransformerXLLayer(cfg) for _ in range(cfg.layers))
        self.layer_norm = nn.LayerNorm(cfg.dim)
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)

    def _lengthen_embeddings(self, length: float) -> None:
        """Embeddings of this length, where their usual one is about 1; the layers read them as long as ever."""
        if not length > 0:
            raise KnnlmError(f"--embedding-length must be above 0, not {length:g}")
        self.input_scale = self.embed_scale / length
        tables = [module for module in self.embed_tokens.modules() if isinstance(module, nn.Embedding)]
        with torch.no_grad():
            for table in tables:  # of an adaptive input, each band has one; its projection keeps lengths
                table.weight.mul_(length)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        text: str | None = None,
        step: int = 0,
        features_only: bool = False,
        **extra: Any,
    ) -> tuple[Tensor, dict]:
        """
        Args:
            src_tokens: (B, T), a segment of each lane
            text: whose memory to use (a split); None: none
            step: number of the segment in its text
        """
        features = self.extract_features(src_tokens, text, step, **extra)
        return features if features_only else self.output_layer(features), {}

    def extract_features(self, src_tokens: Tensor, text: str | None = None, step: int = 0) -> Tensor:
        """(B, T) -> (B, T, C)."""
        embedded = self.input_scale * self.embed_tokens(src_tokens)
        states = F.dropout(embedded, self.dropout, self.training)
        memory = self.lanes.get(text, step, len(self.layers), states)
        length = src_tokens.size(1)
        positions = relative_positions(memory.size(2) + length, self.embed_dim, states.device).to(states)
        future = future_positions(length, states.device)
        inputs = []
        for layer, remembered in zip(self.layers, memory):
            inputs.append(states)
            states = layer(states, remembered, positions, future)
        if text is not None and self.memory_size:
            kept = torch.cat([memory, torch.stack(inputs).detach()], dim=2)[:, :, -self.memory_size :]
            self.lanes.put(text, step, kept)
        return self.layer_norm(states)

    def output_layer(self, features: Tensor) -> Tensor:
        """Logits; with an adaptive softmax the features themselves, as fairseq has it."""
        return features if self.adaptive_softmax is not None else F.linear(features, self.embed_tokens.weight)

    def reach(self, segment: int) -> int:
        """How many tokens back the states depend on, at most: each layer sees the memory and the segment before."""
        return len(self.layers) * (self.memory_size + segment) if self.memory_size else 0

    def max_positions(self) -> int | None:
        return None


@register_model("transformer_xl_lm", dataclass=TransformerXLConfig)
class TransformerXLLanguageModel(FairseqLanguageModel):
    """A language model with a memory of what it has read."""

    @classmethod
    def build_model(cls, cfg: TransformerXLConfig, task: Any) -> "TransformerXLLanguageModel":
        return cls(TransformerXLDecoder(cfg, task.target_dictionary))

    def max_positions(self) -> int | None:
        return None
