"""A split as sentences that stand alone, for the neural editor: one row of tokens each, and batches of them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils

from ..errors import KnnlmError
from .splits import check_split

LONGEST = 64  # tokens; the cost of an edit script grows with the square of it


@dataclass
class Sentences:
    """Tokens with their ends, padded to the longest."""

    tokens: np.ndarray  # (n, T) int32
    lengths: np.ndarray  # (n,) int32, ends included

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.lengths.nbytes

    def fingerprint(self) -> str:
        """SHA-256 of the tokens, sentence by sentence; the padding plays no part."""
        digest = hashlib.sha256(self.lengths.astype("<i4").tobytes())
        inside = np.arange(self.tokens.shape[1]) < self.lengths[:, None]
        digest.update(self.tokens[inside].astype("<i4").tobytes())
        return digest.hexdigest()

    def rows(self, numbers: np.ndarray) -> "Sentences":
        """Some of the sentences, no wider than they need."""
        lengths = self.lengths[numbers]
        return Sentences(self.tokens[numbers][:, : int(lengths.max(initial=1))], lengths)

    def text(self, number: int, dictionary: Dictionary) -> str:
        return words_of(self.tokens[number, : self.lengths[number]], dictionary)


def words_of(tokens: Any, dictionary: Dictionary) -> str:
    """A sentence for a person: up to its end, without it."""
    words = []
    for token in tokens:
        if int(token) in (dictionary.eos(), dictionary.pad()):
            break
        words.append(dictionary[int(token)])
    return " ".join(words)


def load_sentences(data: str, split: str, dictionary: Dictionary, longest: int = LONGEST) -> Sentences:
    """Every line of a split; empty and too long ones are refused, for each must be a prototype or have one."""
    path = str(Path(data) / split)
    check_split(path, dictionary, None)
    lines = data_utils.load_indexed_dataset(path, dictionary)
    lengths = np.array(lines.sizes, np.int32)  # a copy: the original is mapped from a file that is closed with it
    remedy = f"leave such lines out of {split} and run fairseq-preprocess again"
    if (empty := np.flatnonzero(lengths < 2)).size:  # the end alone
        raise KnnlmError(f"line {empty[0] + 1:,} of {path} is empty, and the editor works on sentences; {remedy}")
    if (long := np.flatnonzero(lengths > longest)).size:
        raise KnnlmError(
            f"line {long[0] + 1:,} of {path} has {lengths[long[0]]:,} tokens, more than --longest-sentence {longest}; "
            f"raise that, or {remedy}"
        )
    tokens = np.full((len(lines), int(lengths.max())), dictionary.pad(), np.int32)
    for number, length in enumerate(lengths.tolist()):
        tokens[number, :length] = lines[number].numpy()
    return Sentences(tokens, lengths)


class SentenceDataset(FairseqDataset):
    """Batches of sentences with their embeddings, for ``fairseq-train``."""

    def __init__(self, sentences: Sentences, embeddings: np.ndarray | None, own: bool, dictionary: Dictionary):
        """
        Args:
            embeddings: (n, d); None: the model needs none
            own: whether sentence i is prototype i, which it must not retrieve
        """
        self.sentences, self.embeddings, self.own, self.dictionary = sentences, embeddings, own, dictionary
        self.sizes = sentences.lengths

    def __getitem__(self, index: int) -> int:
        return index  # the collater takes whole rows at once

    def __len__(self) -> int:
        return len(self.sentences)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return self.sizes[indices].astype(np.int64)

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    def ordered_indices(self) -> np.ndarray:
        """By length, equal ones in random order, so that a batch has little padding."""
        order = np.random.permutation(len(self))
        return order[np.argsort(self.sizes[order], kind="stable")]

    def collater(self, samples: list[int]) -> dict:
        if not samples:
            return {}
        numbers = np.asarray(samples, np.int64)
        rows = self.sentences.rows(numbers)
        inputs: dict[str, Any] = {"sentences": torch.from_numpy(rows.tokens.astype(np.int64))}
        if self.embeddings is not None:
            inputs["embeddings"] = torch.from_numpy(self.embeddings[numbers])
            inputs["own"] = torch.from_numpy(numbers if self.own else np.full_like(numbers, -1))
        return {
            "id": torch.from_numpy(numbers), "net_input": inputs, "target": inputs["sentences"],
            "ntokens": int(rows.lengths.sum()), "nsentences": len(numbers),
        }  # fmt: skip
