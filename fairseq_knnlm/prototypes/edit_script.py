"""How a prototype becomes a sentence: keep, substitute, delete, insert, by edit distance, for many pairs at once."""

from typing import NamedTuple

import numpy as np

NONE, KEEP, SUBSTITUTE, DELETE, INSERT = range(5)
OPERATIONS = 5


class EditScripts(NamedTuple):
    """One row per pair, L the longest script; behind the end of a script NONE and padding."""

    operations: np.ndarray  # (n, L)
    before: np.ndarray  # (n, L) the prototype's token; padding where one is inserted
    after: np.ndarray  # (n, L) the sentence's token; padding where one is deleted
    lengths: np.ndarray  # (n,)


def edit_distances(prototypes: np.ndarray, sentences: np.ndarray) -> np.ndarray:
    """Distances between all beginnings: (n, T1), (n, T2) -> (n, T1 + 1, T2 + 1).

    The rows of the table depend on each other, but in a row the cost of insertions is a running minimum of what comes
    from above minus the position: so there is one step of NumPy for each token of the prototype, for all pairs.
    """
    (count, rows), columns = prototypes.shape, sentences.shape[1]
    positions = np.arange(columns + 1, dtype=np.int16)
    table = np.empty((count, rows + 1, columns + 1), np.int16)
    table[:, 0] = positions
    for row in range(rows):
        above = table[:, row]
        best = above + 1
        np.minimum(best[:, 1:], above[:, :-1] + (prototypes[:, row, None] != sentences), out=best[:, 1:])
        table[:, row + 1] = np.minimum.accumulate(best - positions, axis=1) + positions
    return table


def edit_scripts(
    prototypes: np.ndarray, prototype_lengths: np.ndarray, sentences: np.ndarray, lengths: np.ndarray, pad: int
) -> EditScripts:
    """The cheapest script of each pair; of equally cheap ones the one that aligns tokens late in the sentence.

    Args:
        prototypes, sentences: (n, T1), (n, T2) tokens
        prototype_lengths, lengths: (n,) how many of them count
    """
    table = edit_distances(prototypes, sentences)
    count = len(table)
    pairs = np.arange(count)
    row, column = prototype_lengths.astype(np.int64), lengths.astype(np.int64)
    longest = int((row + column).max(initial=1))
    operations = np.full((count, longest), NONE, np.int64)
    before, after = np.full_like(operations, pad), np.full_like(operations, pad)
    place = longest
    while ((row > 0) | (column > 0)).any():
        place -= 1
        here = table[pairs, row, column]
        up, left = np.maximum(row - 1, 0), np.maximum(column - 1, 0)
        old, new = prototypes[pairs, up], sentences[pairs, left]
        both = (row > 0) & (column > 0)
        same = old == new
        diagonal = both & (table[pairs, up, left] + ~same == here)
        delete = ~diagonal & (row > 0) & (table[pairs, up, column] + 1 == here)
        insert = ~diagonal & ~delete & (column > 0)
        cases = [diagonal & same, diagonal, delete, insert]
        operations[:, place] = np.select(cases, [KEEP, SUBSTITUTE, DELETE, INSERT], NONE)
        before[:, place] = np.where(diagonal | delete, old, pad)
        after[:, place] = np.where(diagonal | insert, new, pad)
        row, column = row - (diagonal | delete), column - (diagonal | insert)
    # The scripts were written from behind and end at the same place; they shall begin at the same place.
    sizes = (operations != NONE).sum(axis=1)
    width = int(sizes.max(initial=1))
    take = np.arange(width)[None] + (longest - sizes)[:, None]
    inside = take < longest
    take = np.minimum(take, longest - 1)

    def aligned(array: np.ndarray, rest: int) -> np.ndarray:
        return np.where(inside, np.take_along_axis(array, take, axis=1), rest)

    return EditScripts(aligned(operations, NONE), aligned(before, pad), aligned(after, pad), sizes)
