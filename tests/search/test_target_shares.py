"""Shares of a target in lists that nobody reads, against counting entries."""

import numpy as np
import pytest

from fairseq_knnlm.search import target_shares
from fairseq_knnlm.search.target_shares import log_target_shares


class KnownLists:
    """What is known of lists whose entries have these values."""

    def __init__(self, members: list[np.ndarray]):
        self._runs = [np.unique(own, return_counts=True) for own in members]

    def run_values_of(self, number: int) -> np.ndarray:
        return self._runs[number][0]

    def run_counts_of(self, number: int) -> np.ndarray:
        return self._runs[number][1]


@pytest.mark.parametrize("vocabulary", [7, 100_000])
@pytest.mark.parametrize("places_at_once, lists_per_job", [(1, 1), (12, 2), (1000, 1000)])
def test_shares_are_those_of_counting(vocabulary, places_at_once, lists_per_job, monkeypatch):
    monkeypatch.setattr(target_shares, "PLACES_AT_ONCE", places_at_once)
    monkeypatch.setattr(target_shares, "LISTS_PER_JOB", lists_per_job)
    rng = np.random.default_rng(vocabulary)
    members = [np.sort(rng.integers(0, vocabulary, size)) for size in (5, 0, 40, 1, 300)]
    counts = np.array([len(own) for own in members])
    there = np.concatenate(members)
    targets = np.concatenate([rng.choice(there, 30), [0, vocabulary - 1, vocabulary + 5, vocabulary * 3]])
    asked = rng.integers(-1, len(members), (len(targets), 4))
    expected = [
        [(members[number] == target).mean() if number >= 0 and counts[number] else 0.0 for number in row]
        for row, target in zip(asked, targets)
    ]
    shares = log_target_shares(KnownLists(members), counts, asked, targets)
    np.testing.assert_allclose(shares.exp().numpy(), expected, rtol=1e-6)


def test_nothing_is_asked():
    known, counts = KnownLists([np.arange(3)]), np.array([3])
    assert log_target_shares(known, counts, np.empty((0, 2), np.int64), np.empty(0, np.int64)).shape == (0, 2)
    assert log_target_shares(known, counts, np.empty((2, 0), np.int64), np.arange(2)).shape == (2, 0)
