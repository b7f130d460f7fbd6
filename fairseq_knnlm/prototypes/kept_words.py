"""What sentences keep of their prototypes: the share of their words that are kept, by class of words."""

from collections.abc import Sequence

import numpy as np

from ..data.sentences import Sentences
from ..errors import KnnlmError
from .edit_script import INSERT, KEEP, SUBSTITUTE, edit_scripts

CLASSES = (100, 1000, 10000)  # ranks by frequency at which a class ends


def frequency_classes(special: int, size: int) -> tuple[np.ndarray, list[str]]:
    """The class of each token of a dictionary that is sorted by frequency, as fairseq's are: (size,), and the names.

    Args:
        special: symbols before the first word
    """
    ranks = np.arange(size) - special + 1
    bounds = [bound for bound in CLASSES if bound < size - special]
    first = [1, *(bound + 1 for bound in bounds)]
    names = [f"ranks {a:,} to {b:,}" for a, b in zip(first, [*bounds, size - special])]
    return np.searchsorted(bounds, np.maximum(ranks, 1)), names


def read_tags(lines: Sequence[str], sentences: Sentences, name: str) -> tuple[np.ndarray, list[str]]:
    """The class of each word from a tagger's file, one tag per word: (n, T), -1: no word; the names."""
    if len(lines) != len(sentences):
        raise KnnlmError(f"{name} has {len(lines):,} lines, the split {len(sentences):,}; give one line per sentence")
    names = sorted({tag for line in lines for tag in line.split()})
    numbers = {tag: number for number, tag in enumerate(names)}
    classes = np.full(sentences.tokens.shape, -1)
    for row, line in enumerate(lines):
        tags = line.split()
        words = sentences.lengths[row] - 1
        if len(tags) != words:
            raise KnnlmError(f"line {row + 1:,} of {name} has {len(tags)} tags for {words} words; give one per word")
        classes[row, : len(tags)] = [numbers[tag] for tag in tags]
    return classes, names


def kept_words(prototypes: Sentences, sentences: Sentences, pad: int) -> np.ndarray:
    """Whether each token of the sentences is kept from its prototype, one for each: (n, T)."""
    scripts = edit_scripts(prototypes.tokens, prototypes.lengths, sentences.tokens, sentences.lengths, pad)
    kept = np.zeros(sentences.tokens.shape, bool)
    given = np.isin(scripts.operations, (KEEP, SUBSTITUTE, INSERT))  # steps that give a token of the sentence
    places = given.cumsum(axis=1) - 1
    rows, columns = np.nonzero(scripts.operations == KEEP)
    kept[rows, places[rows, columns]] = True
    return kept


def shares_by_class(kept: np.ndarray, classes: np.ndarray, lengths: np.ndarray, names: list[str]) -> list[dict]:
    """For each class how many words of the sentences are of it, and which share of them is kept; ends are no words.

    Args:
        kept, classes: (n, T); a class below 0 is no word
    """
    inside = (np.arange(kept.shape[1]) < lengths[:, None] - 1) & (classes >= 0)
    words = np.bincount(classes[inside], minlength=len(names))
    found = np.bincount(classes[inside & kept], minlength=len(names))
    return [
        {"class": name, "words": int(count), "kept": float(hits / count) if count else 0.0}
        for name, count, hits in zip(names, words, found)
    ]
