"""Scores of raw text, without binarising it: a model, its memories, and lists of tokens."""

import warnings
from collections.abc import Iterator

import torch
from fairseq.data import Dictionary

from ..errors import KnnlmError
from ..keys import Model
from ..memory import DatastoreMemory, Memory
from .scoring import TokenScores, score_tokens

BLOCKS_PER_BATCH = 8


class TextScorer:
    """Scores sequences of tokens, each beginning as if after the end of a line."""

    def __init__(self, model: Model, dictionary: Dictionary, memories: list[DatastoreMemory]):
        self.model, self.dictionary, self.memories = model, dictionary, memories
        self.device = next(model.parameters()).device

    def encode(self, line: str) -> list[int]:
        """Words between blanks, and the end of the line."""
        return self.dictionary.encode_line(line, add_if_not_exist=False).tolist()

    def score(self, sequences: list[list[int]]) -> TokenScores:
        """Sequences longer than the model allows are scored in blocks, each with half of that to its left."""
        memories: list[Memory] = list(self.memories)
        with warnings.catch_warnings():  # torch's, about masks that fairseq makes
            warnings.filterwarnings("ignore", message=".*mismatched key_padding_mask")
            return score_tokens(self.model, list(self._batches(sequences)), memories, keep_states=True)

    def _batches(self, sequences: list[list[int]]) -> Iterator[dict]:
        """fairseq batches of some blocks each, in order."""
        blocks = [block for sequence in sequences for block in self._blocks(sequence)]
        pad = self.dictionary.pad()
        for start in range(0, len(blocks), BLOCKS_PER_BATCH):
            some = blocks[start : start + BLOCKS_PER_BATCH]
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
