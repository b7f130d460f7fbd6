"""Edit scripts of many pairs at once against a plain table of one pair."""

import numpy as np
import pytest

from fairseq_knnlm.data.sentences import Sentences
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.prototypes.edit_script import DELETE, INSERT, KEEP, NONE, SUBSTITUTE, edit_distances, edit_scripts
from fairseq_knnlm.prototypes.kept_words import frequency_classes, kept_words, read_tags, shares_by_class

PAD = 1


def distance(old: list[int], new: list[int]) -> int:
    """Levenshtein, cell by cell."""
    row = list(range(len(new) + 1))
    for i, a in enumerate(old, start=1):
        previous, row = row, [i]
        for j, b in enumerate(new, start=1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (a != b)))
    return row[-1]


def padded(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(row) for row in rows])
    tokens = np.full((len(rows), lengths.max()), PAD, np.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    return tokens, lengths


@pytest.fixture(scope="module")
def pairs():
    rng = np.random.default_rng(1)
    draw = lambda: [rng.integers(4, 9, rng.integers(1, 12)).tolist() for _ in range(300)]  # noqa: E731
    return draw(), draw()


def test_distances(pairs):
    (old, old_lengths), (new, new_lengths) = map(padded, pairs)
    table = edit_distances(old, new)
    ours = table[np.arange(len(old)), old_lengths, new_lengths]
    assert ours.tolist() == [distance(a, b) for a, b in zip(*pairs)]


def test_scripts_turn_one_into_the_other_as_cheaply_as_possible(pairs):
    (old, old_lengths), (new, new_lengths) = map(padded, pairs)
    scripts = edit_scripts(old, old_lengths, new, new_lengths, PAD)
    for row, (a, b) in enumerate(zip(*pairs)):
        length = scripts.lengths[row]
        operations, before, after = (part[row, :length] for part in scripts[:3])
        assert (operations != NONE).all() and (scripts.operations[row, length:] == NONE).all()
        assert before[operations != INSERT].tolist() == a and after[operations != DELETE].tolist() == b
        assert (before[operations == INSERT] == PAD).all() and (after[operations == DELETE] == PAD).all()
        assert ((before == after) == (operations == KEEP)).all()
        assert (operations != KEEP).sum() == distance(a, b)


def test_a_script_by_hand():
    (old, old_lengths), (new, new_lengths) = padded([[5, 6, 7, 2]]), padded([[5, 8, 9, 2]])
    scripts = edit_scripts(old, old_lengths, new, new_lengths, PAD)
    assert scripts.operations[0].tolist() == [KEEP, SUBSTITUTE, SUBSTITUTE, KEEP]


def test_kept_words_by_class():
    """the cat sat / a cat sat down: cat and sat are kept."""
    the, cat, sat, a, down, end = 4, 6, 7, 5, 8, 2
    prototypes = Sentences(*padded([[the, cat, sat, end]]))
    sentences = Sentences(*padded([[a, cat, sat, down, end]]))
    kept = kept_words(prototypes, sentences, PAD)
    assert kept.tolist() == [[False, True, True, False, True]]
    classes, names = read_tags(["DET N V ADV"], sentences, "tags.txt")
    rows = shares_by_class(kept, classes, sentences.lengths, names)
    shares = {row["class"]: (row["words"], row["kept"]) for row in rows}
    assert shares == {"ADV": (1, 0.0), "DET": (1, 0.0), "N": (1, 1.0), "V": (1, 1.0)}
    with pytest.raises(KnnlmError, match="has 2 tags for 4 words"):
        read_tags(["DET N"], sentences, "tags.txt")
    with pytest.raises(KnnlmError, match="has 0 lines, the split 1"):
        read_tags([], sentences, "tags.txt")


def test_frequency_classes():
    classes, names = frequency_classes(4, 4 + 1500)
    assert names == ["ranks 1 to 100", "ranks 101 to 1,000", "ranks 1,001 to 1,500"]
    assert classes[[4, 103, 104, 1003, 1004]].tolist() == [0, 0, 1, 1, 2]
