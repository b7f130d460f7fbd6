"""Scores of raw text, without binarising it: a model, its memories, and lists of tokens."""

import warnings
from collections.abc import Iterator

import torch
from fairseq.data import Dictionary

from ..data.text_encoding import DictionaryText, TextForm
from ..errors import KnnlmError
from ..keys import Model
from ..memory import DatastoreMemory, Memory
from .gate import Gate
from .scoring import TokenScores, score_tokens

BLOCKS_PER_BATCH = 8
FEW_UNKNOWN = 0.03  # of the tokens; data that was binarised well has less


def describe_unknown(unknown: int, words: int) -> str:
    """A sentence if more than a few percent of the words are unknown; empty if not."""
    if not words or unknown / words <= FEW_UNKNOWN:
        return ""
    return (
        f"warning: {unknown / words:.1%} of the tokens ({unknown:,} of {words:,}) are not in the dictionary; <unk> is "
        "easy to predict, so the perplexity flatters; tokenise the text as the model's data was (--tokenizer, --bpe)"
    )


class TextScorer:
    """Scores sequences of tokens, each beginning as if after the end of a line."""

    def __init__(
        self,
        model: Model,
        dictionary: Dictionary,
        memories: list[Memory],
        gate: Gate | None = None,
        text: TextForm | None = None,
    ):
        """text: how the model reads raw text, by default as words between blanks"""
        self.model, self.dictionary, self.memories, self.gate = model, dictionary, memories, gate
        self.device = next(model.parameters()).device
        self.text = text or DictionaryText(dictionary)

    @property
    def datastores(self) -> list[DatastoreMemory]:
        """Those of the memories that neighbours can be looked up in; they come first."""
        return [memory for memory in self.memories if isinstance(memory, DatastoreMemory)]

    def unknown_words(self, sequences: list[list[int]]) -> str:
        """A warning if so much of a text is unknown that its perplexity says little; empty if not."""
        words = [token for sequence in sequences for token in sequence if token != self.dictionary.eos()]
        return describe_unknown(words.count(self.dictionary.unk()), len(words))

    def score(self, sequences: list[list[int]]) -> TokenScores:
        """Sequences longer than the model allows are scored in blocks, each with half of that to its left."""
        with warnings.catch_warnings():  # torch's, about masks that fairseq makes
            warnings.filterwarnings("ignore", message=".*mismatched key_padding_mask")
            batches = list(self._batches(sequences))
            return score_tokens(self.model, batches, self.memories, keep_states=True, gate=self.gate)

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
