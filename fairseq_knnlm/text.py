"""Scores of raw text, without binarising it: a model, its memories, and lists of tokens."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

from .errors import KnnlmError
from .probs import interpolate
from .retrieval import Retriever
from .scorer import KNNSequenceScorer

ROWS_AT_ONCE = 8


@dataclass
class ScoredText:
    """The n tokens of one or several sequences, one after the other."""

    tokens: Tensor  # (n,)
    lm: Tensor  # (n,) log-probabilities
    memories: list[Tensor]  # (n,) of each retriever, -inf where the token was not retrieved
    mixture: Tensor  # (n,)
    queries: list[Tensor] = field(repr=False)  # (n, dim) of each retriever
    features: Tensor = field(repr=False)  # (n, C), what the output layer sees

    def from_token(self, start: int) -> "ScoredText":
        """Without the first tokens."""
        return ScoredText(
            self.tokens[start:],
            self.lm[start:],
            [memory[start:] for memory in self.memories],
            self.mixture[start:],
            [queries[start:] for queries in self.queries],
            self.features[start:],
        )


class TextScorer:
    """Scores sequences of tokens, each beginning as if after the end of a line."""

    def __init__(self, model: nn.Module, dictionary: Dictionary, retrievers: list[Retriever]):
        self.model, self.dictionary, self.retrievers = model.eval(), dictionary, retrievers
        self._scorer = KNNSequenceScorer(dictionary, None, retrievers)
        self.device = next(model.parameters()).device

    def encode(self, line: str) -> list[int]:
        """Words between blanks, and the end of the line."""
        return self.dictionary.encode_line(line, add_if_not_exist=False).tolist()

    @torch.no_grad()
    def score(self, sequences: list[list[int]]) -> ScoredText:
        """Sequences longer than the model allows are scored in blocks, each with half of that to its left."""
        targets, lm, queries, features = [], [], [], []
        for batch in self._batches(sequences):
            with warnings.catch_warnings():  # torch's, about masks that fairseq makes
                warnings.filterwarnings("ignore", message=".*mismatched key_padding_mask")
                results = self._scorer.run_model(self.model, batch)
            for kept, result in zip((targets, lm, queries, features), results):
                kept.append(result)
        targets, lm, features = torch.cat(targets), torch.cat(lm), torch.cat(features)
        queries = [torch.cat(parts) for parts in zip(*queries)]
        memories = [r.target_log_probs(query, targets) for r, query in zip(self.retrievers, queries)]
        mixture = interpolate(lm, memories, [retriever.weight for retriever in self.retrievers])
        return ScoredText(targets, lm, memories, mixture, queries, features)

    def _batches(self, sequences: list[list[int]]) -> Iterator[dict]:
        """fairseq batches of some blocks each, in order."""
        blocks = [block for sequence in sequences for block in self._blocks(sequence)]
        pad = self.dictionary.pad()
        for start in range(0, len(blocks), ROWS_AT_ONCE):
            some = blocks[start : start + ROWS_AT_ONCE]
            longest = max(len(source) for source, _, _ in some)
            sources, targets = torch.full((2, len(some), longest), pad, device=self.device)
            for row, (source, target, _) in enumerate(some):
                sources[row, : len(source)] = torch.tensor(source)
                targets[row, : len(target)] = torch.tensor(target)
            lengths = torch.tensor([len(source) for source, _, _ in some], device=self.device)
            yield {
                "net_input": {"src_tokens": sources, "src_lengths": lengths},
                "target": targets,
                "start_indices": [own for _, _, own in some],
            }

    def _blocks(self, sequence: list[int]) -> Iterator[tuple[list[int], list[int], int]]:
        """Source, target, and where the tokens to score begin."""
        if not sequence:
            raise KnnlmError("there is no text to score; give at least one word")
        limit = min(self.model.max_positions() or len(sequence), len(sequence))
        source = [self.dictionary.eos(), *sequence[:-1]]
        start = 0
        while start < len(sequence):
            context = min(start, limit // 2) if len(sequence) > limit else start
            stop = min(start - context + limit, len(sequence))
            yield source[start - context : stop], sequence[start - context : stop], context
            start = stop
