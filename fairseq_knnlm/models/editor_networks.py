"""The networks of the neural editor: p(x|t, z) as an LSTM or a Transformer, and the mean of q(z|t, x)."""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ..prototypes.edit_script import OPERATIONS, edit_scripts

OPERATION_DIM = 16
TINY = 1e-9  # the least that copying gives to a word, so that it has a logarithm


class ReadPrototypes(NamedTuple):
    """What the editor attends to."""

    states: Tensor  # (n, S, H)
    absent: Tensor  # (n, S) padding
    tokens: Tensor  # (n, S)

    def repeat(self, times: int) -> "ReadPrototypes":
        """Each prototype so many times in a row."""
        return ReadPrototypes(*(part.repeat_interleave(times, dim=0) for part in self))


def run_lstm(lstm: nn.LSTM, inputs: Tensor, lengths: Tensor) -> Tensor:
    """The outputs of a bidirectional LSTM that reads each row to its own end: (n, S, C) -> (n, S, H)."""
    packed = pack_padded_sequence(inputs, lengths.cpu(), batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(lstm(packed)[0], batch_first=True, total_length=inputs.size(1))[0]


class EditEncoder(nn.Module):
    """mu(t, x): a BiLSTM over the edit script, each step an operation with the tokens it takes and gives."""

    def __init__(self, embed: nn.Embedding, hidden: int, dim: int):
        super().__init__()
        self.embed, self.pad = [embed], int(embed.padding_idx or 0)  # in a list: the editor owns it
        self.operations = nn.Embedding(OPERATIONS, OPERATION_DIM)
        self.lstm = nn.LSTM(OPERATION_DIM + 2 * embed.embedding_dim, hidden, batch_first=True, bidirectional=True)
        self.project = nn.Linear(2 * hidden, dim)

    def forward(self, prototypes: Tensor, sentences: Tensor) -> Tensor:
        """(n, S), (n, T) padded tokens -> (n, dim), of length one."""
        device = sentences.device
        old, new = prototypes.cpu().numpy(), sentences.cpu().numpy()
        scripts = edit_scripts(old, (old != self.pad).sum(1), new, (new != self.pad).sum(1), self.pad)
        operations, before, after = (torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in scripts[:3])
        embed, lengths = self.embed[0], torch.from_numpy(scripts.lengths)
        inputs = torch.cat([self.operations(operations), embed(before), embed(after)], dim=-1)
        states = run_lstm(self.lstm, inputs, lengths)
        means = states.sum(dim=1) / lengths[:, None].to(states)  # behind the end the states are zero
        return F.normalize(self.project(means), dim=-1)


class Editor(nn.Module):
    """p(x|t, z): what both networks share, the words they read and how a state becomes a word.

    A subclass reads prototypes (``read_states``) and what has been written so far (``write_states``). Without
    prototypes it is a language model of the same decoder.
    """

    def __init__(self, embed: nn.Embedding, hidden: int, edit_dim: int, dropout: float, prototypes: bool, copy: bool):
        super().__init__()
        self.embed, self.pad = embed, int(embed.padding_idx or 0)
        self.dropout = nn.Dropout(dropout)
        self.prototypes, self.edit_dim = prototypes, edit_dim if prototypes else 0
        read = hidden if prototypes else 0
        self.attention = nn.Linear(hidden, hidden, bias=False) if prototypes else None
        self.combine = nn.Linear(hidden + read + self.edit_dim, embed.embedding_dim)
        self.bias = nn.Parameter(torch.zeros(embed.num_embeddings))
        self.copy_gate = nn.Linear(embed.embedding_dim, 1) if copy and prototypes else None

    def read_states(self, embedded: Tensor, absent: Tensor) -> Tensor:
        raise NotImplementedError

    def write_states(self, inputs: Tensor, read: ReadPrototypes | None, edit: Tensor | None) -> Tensor:
        raise NotImplementedError

    def read(self, prototypes: Tensor) -> ReadPrototypes:
        """(n, S) padded tokens."""
        absent = prototypes == self.pad
        return ReadPrototypes(self.read_states(self.dropout(self.embed(prototypes)), absent), absent, prototypes)

    def forward(
        self, previous: Tensor, read: ReadPrototypes | None, edit: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """States before the softmax (n, T, E) and the attention to the prototypes (n, T, S).

        Args:
            previous: (n, T) the words before each word, the first is the end of another sentence
            edit: (n, d) edit vectors, which every position gets
        """
        inputs = self.dropout(self.embed(previous))
        places = None
        if edit is not None:
            places = edit[:, None].expand(-1, previous.size(1), -1)
            inputs = torch.cat([inputs, places], dim=-1)
        states = self.dropout(self.write_states(inputs, read, edit))
        parts, shares = [states], None
        if read is not None and self.attention is not None:
            scores = self.attention(states) @ read.states.transpose(1, 2)
            shares = scores.masked_fill(read.absent[:, None], -torch.inf).softmax(dim=-1)
            parts.append(shares @ read.states)
        if places is not None:
            parts.append(places)
        return self.dropout(torch.tanh(self.combine(torch.cat(parts, dim=-1)))), shares

    def log_likelihood(self, sentences: Tensor, read: ReadPrototypes | None, edit: Tensor | None, eos: int) -> Tensor:
        """log p(x|t, z), the end included: (n, T) -> (n,)."""
        states, shares = self(previous_words(sentences, eos), read, edit)
        inside = sentences != self.pad
        words = states[inside]  # (tokens, E)
        scores = -F.cross_entropy(F.linear(words, self.embed.weight, self.bias), sentences[inside], reduction="none")
        if self.copy_gate is not None and read is not None and shares is not None:
            copied = (shares * (read.tokens[:, None] == sentences[:, :, None])).sum(dim=-1)[inside]
            gate = self.copy_gate(words)[:, 0]
            scores = torch.logaddexp(F.logsigmoid(-gate) + scores, F.logsigmoid(gate) + (copied + TINY).log())
        result = scores.new_zeros(sentences.shape)
        return result.masked_scatter(inside, scores).sum(dim=1)

    def next_log_probs(self, previous: Tensor, read: ReadPrototypes | None, edit: Tensor | None) -> Tensor:
        """log p of the word after ``previous`` (n, T): (n, V)."""
        states, shares = self(previous, read, edit)
        words = states[:, -1]
        scores = F.linear(words, self.embed.weight, self.bias).log_softmax(dim=-1)
        if self.copy_gate is not None and read is not None and shares is not None:
            copied = torch.zeros_like(scores).scatter_add_(1, read.tokens, shares[:, -1])
            gate = self.copy_gate(words)
            scores = torch.logaddexp(F.logsigmoid(-gate) + scores, F.logsigmoid(gate) + (copied + TINY).log())
        return scores


def previous_words(sentences: Tensor, eos: int) -> Tensor:
    """(n, T) -> (n, T): each word's predecessor, before the first one the end."""
    return torch.cat([torch.full_like(sentences[:, :1], eos), sentences[:, :-1]], dim=1)


class LSTMEditor(Editor):
    """As in the paper: a BiLSTM reads, an LSTM with attention writes, z is at every input and in the first state."""

    def __init__(self, embed: nn.Embedding, cfg: Any, prototypes: bool):
        hidden = cfg.hidden_dim
        super().__init__(embed, hidden, cfg.edit_dim, cfg.dropout, prototypes, cfg.copy_words)
        if prototypes:
            self.reader = nn.LSTM(embed.embedding_dim, hidden // 2, batch_first=True, bidirectional=True)
            self.start = nn.Linear(hidden + self.edit_dim, 2 * cfg.editor_layers * hidden)
        size = embed.embedding_dim + self.edit_dim
        self.writer = nn.LSTM(size, hidden, cfg.editor_layers, batch_first=True)
        self.layers = cfg.editor_layers

    def read_states(self, embedded: Tensor, absent: Tensor) -> Tensor:
        return run_lstm(self.reader, embedded, (~absent).sum(dim=1))

    def write_states(self, inputs: Tensor, read: ReadPrototypes | None, edit: Tensor | None) -> Tensor:
        if read is None or edit is None:
            return self.writer(inputs)[0]
        mean = read.states.sum(dim=1) / (~read.absent).sum(dim=1, keepdim=True)
        first = torch.tanh(self.start(torch.cat([mean, edit], dim=-1))).view(len(edit), 2, self.layers, -1)
        hidden, cell = first.permute(1, 2, 0, 3).contiguous()
        return self.writer(inputs, (hidden, cell))[0]


class TransformerEditor(Editor):
    """A small pre-norm Transformer in the LSTM's place; z is at every input, too."""

    def __init__(self, embed: nn.Embedding, cfg: Any, prototypes: bool):
        hidden = cfg.hidden_dim
        super().__init__(embed, hidden, cfg.edit_dim, cfg.dropout, prototypes, cfg.copy_words)
        settings = {"dropout": cfg.dropout, "batch_first": True, "norm_first": True}
        sizes = (hidden, cfg.editor_heads, 4 * hidden)
        self.positions = nn.Embedding(cfg.longest_text, hidden)
        if prototypes:
            self.reader_input = nn.Linear(embed.embedding_dim, hidden)
            readers = nn.TransformerEncoderLayer(*sizes, **settings)
            self.reader = nn.TransformerEncoder(
                readers, cfg.editor_layers, nn.LayerNorm(hidden), enable_nested_tensor=False
            )
        self.writer_input = nn.Linear(embed.embedding_dim + self.edit_dim, hidden)
        layer = nn.TransformerDecoderLayer if prototypes else nn.TransformerEncoderLayer
        self.writer = nn.ModuleList([layer(*sizes, **settings) for _ in range(cfg.editor_layers)])
        self.norm = nn.LayerNorm(hidden)

    def _place(self, states: Tensor) -> Tensor:
        return states + self.positions.weight[: states.size(1)]

    def read_states(self, embedded: Tensor, absent: Tensor) -> Tensor:
        return self.reader(self._place(self.reader_input(embedded)), src_key_padding_mask=absent)

    def write_states(self, inputs: Tensor, read: ReadPrototypes | None, edit: Tensor | None) -> Tensor:
        states = self._place(self.writer_input(inputs))
        length = inputs.size(1)
        later = torch.ones(length, length, dtype=torch.bool, device=inputs.device).triu(1)
        for layer in self.writer:
            if read is None:
                states = layer(states, src_mask=later)
            else:
                states = layer(states, read.states, tgt_mask=later, memory_key_padding_mask=read.absent)
        return self.norm(states)
