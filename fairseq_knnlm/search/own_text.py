"""Entries of one datastore as queries for another, and where they stand in its text, so that no token finds itself.

Queries may be the very text that the datastore is of, a subsample of it, or a part of it that was binarised on its own
(the first half million tokens, say). The first two are told by their record. A part is found by its tokens: passages of
the one are looked for in the other, and if they all lie at one distance, that is where the part stands.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ..datastore import Datastore
from ..errors import KnnlmError

PASSAGE = 16  # tokens of a passage that is looked for
PASSAGES = 64  # how many, spread over the text
MOST_PASSAGES = 4096
ALIKE = 0.99  # of the tokens where both overlap; the end of a part that was cut inside a line is an additional </s>
MANY, SOME = 0.5, 0.05  # of the passages: too many for another text, and enough for a word about it
SEQUENCE = 512  # tokens, where the manifest does not say how many the model saw at once
MOST_PLACES = 1000  # of one passage, which then says nothing: a line of a table that is everywhere


def query_vectors(datastore: Datastore, queries: Datastore, rows: np.ndarray) -> np.ndarray:
    """Keys of one datastore as queries for another: (n,) -> (n, dim of the datastore) float32."""
    vectors = queries.gather_keys(rows).astype(np.float32)
    return vectors if queries.manifest.projection else datastore.codec.project(vectors)


def default_window(queries: Datastore) -> int:
    """How near an entry of the same text has to be to be left out: within a sequence, whose context they share."""
    return int(queries.manifest.source.get("tokens_per_sample", SEQUENCE))


@dataclass
class Placement:
    """Where queries stand in a datastore's text."""

    positions: np.ndarray | None  # (queries,) in that text; None: it is another text
    sentence: str  # what a person should know of it; empty if there is nothing to say

    @property
    def own_text(self) -> bool:
        return self.positions is not None


def place_queries(datastore: Datastore, queries: Datastore) -> Placement:
    """Find the queries in the datastore's text; refuse those that are in it, but not in one piece."""
    own = np.arange(len(queries)) if queries.positions is None else np.asarray(queries.positions)
    texts = [store.manifest.source.get("data_sha256") for store in (datastore, queries)]
    if queries.fingerprint == datastore.fingerprint or (texts[0] == texts[1] and texts[0] is not None):
        return Placement(own, "")
    if datastore.positions is not None and queries.positions is not None:
        return Placement(
            None,
            f"warning: {datastore.folder} and {queries.folder} are subsamples of different files, so it cannot be told "
            "whether one text is a part of the other; they are taken for different texts",
        )
    passages = _look_for_passages(datastore, queries, own)
    offset, best = max(passages.offsets.items(), key=lambda item: (item[1], -abs(item[0])), default=(0, 0))
    overlap, alike = _compare(datastore, queries, own, offset) if best else (0, 0.0)
    if best and alike >= ALIKE and overlap >= min(PASSAGE, len(queries)):
        sentence = (
            f"{queries.folder} is a part of the text of {datastore.folder}: its tokens {offset:,} to "
            f"{offset + int(own[-1]):,}"
        )
        if overlap < len(queries):
            sentence += f", of which the datastore holds {overlap:,} of {len(queries):,}"
        return Placement(own + offset, sentence)
    share = min(1.0, passages.found / passages.expected)
    if share >= MANY:
        raise KnnlmError(
            f"{share:.0%} of the passages of {queries.folder} also stand in {datastore.folder}, but not in one piece, "
            "so a token's own entry cannot be told from others; dump queries of one contiguous part of that text"
        )
    if share >= SOME:
        return Placement(
            None,
            f"warning: {share:.0%} of the passages of {queries.folder} also stand in {datastore.folder}; both are "
            "taken for different texts",
        )
    return Placement(None, "")


@dataclass
class _Passages:
    """What was found of some passages."""

    expected: float  # how many would be found if one text were a part of the other
    found: int
    offsets: Counter[int]  # (position in the datastore's text - in the queries' own) -> how many passages say so


def _look_for_passages(datastore: Datastore, queries: Datastore, own: np.ndarray) -> _Passages:
    """Passages of the one text, looked for in the other.

    A subsample has gaps, and where passages with gaps are looked for must have none: so they are those of the queries,
    or else those of the datastore, looked for in the queries.
    """
    turned = datastore.positions is not None
    pattern = datastore if turned else queries
    places = np.asarray(datastore.positions) if turned else own
    text = queries.values if turned else datastore.values
    ratio = max(1.0, (int(places[-1]) + 1) / len(text)) if turned else 1.0  # only a part of them can be found then
    length = min(PASSAGE, len(places))
    starts = np.unique(np.linspace(0, len(places) - length, min(int(PASSAGES * ratio), MOST_PASSAGES)).astype(np.int64))
    frequency = np.bincount(pattern.values)
    passages = _Passages(len(starts) / ratio, 0, Counter())
    for start in starts.tolist():
        part = slice(start, start + length)
        found = _find(text, pattern.values[part], places[part] - places[start], frequency)
        passages.found += len(found) > 0
        if len(found) <= MOST_PLACES:
            shift = found - int(places[start])
            passages.offsets.update((-shift if turned else shift).tolist())
    return passages


def _find(text: np.ndarray, tokens: np.ndarray, gaps: np.ndarray, frequency: np.ndarray) -> np.ndarray:
    """Where ``tokens`` (m,) stand in ``text``, each so many places behind the first (gaps (m,)): (found,) places."""
    room = len(text) - int(gaps[-1])
    if room < 1:
        return np.zeros(0, np.int64)
    order = np.argsort(frequency[tokens], kind="stable")  # the rarest first: few places are left to look at
    rarest = int(order[0])
    first = int(gaps[rarest])
    found = np.flatnonzero(text[first : first + room] == tokens[rarest])
    for number in order[1:]:
        found = found[text[found + gaps[number]] == tokens[number]]
    return found


def _compare(datastore: Datastore, queries: Datastore, own: np.ndarray, offset: int) -> tuple[int, float]:
    """With the queries at this offset: how many of them the datastore holds, and how many of these are the same."""
    places = own + offset
    if datastore.positions is None:
        inside = (places >= 0) & (places < len(datastore))
        entries = places[inside]
    else:
        stored = np.asarray(datastore.positions)
        entries = np.searchsorted(stored, places)
        inside = (entries < len(stored)) & (stored[np.minimum(entries, len(stored) - 1)] == places)
        entries = entries[inside]
    same = datastore.values[entries] == queries.values[inside]
    return int(inside.sum()), float(same.mean()) if len(same) else 0.0
