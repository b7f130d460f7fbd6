"""Shares of a target in lists that nobody reads, against counting entries."""

from types import SimpleNamespace

import numpy as np
import pytest

from fairseq_knnlm.search import target_shares
from fairseq_knnlm.search.target_shares import TargetShares


def lists_of(members: list[np.ndarray]) -> SimpleNamespace:
    """What is known of lists whose entries have these values, each list ascending."""
    values = [np.unique(own) for own in members]
    return SimpleNamespace(
        run_values=np.concatenate(values), run_starts=np.cumsum([0, *(len(own) for own in values)])
    )  # fmt: skip


@pytest.mark.parametrize("vocabulary", [7, 100_000])
@pytest.mark.parametrize("queries_per_job", [1, 3, 1000])
def test_shares_are_those_of_counting(vocabulary, queries_per_job, monkeypatch):
    monkeypatch.setattr(target_shares, "QUERIES_PER_JOB", queries_per_job)
    rng = np.random.default_rng(vocabulary)
    members = [np.sort(rng.integers(0, vocabulary, size)) for size in (5, 0, 40, 1, 300)]
    counts = np.array([len(own) for own in members])
    run_counts = np.concatenate([np.unique(own, return_counts=True)[1] for own in members])
    shares = TargetShares(lists_of(members), counts, run_counts)
    there = np.concatenate(members)
    targets = np.concatenate([rng.choice(there, 30), [0, vocabulary - 1, vocabulary + 5, vocabulary * 3]])
    asked = rng.integers(-1, len(members), (len(targets), 4))
    expected = [
        [(members[number] == target).mean() if number >= 0 and counts[number] else 0.0 for number in row]
        for row, target in zip(asked, targets)
    ]
    np.testing.assert_allclose(shares(asked, targets).exp().numpy(), expected, rtol=1e-6)


def test_nothing_is_asked():
    shares = TargetShares(lists_of([np.arange(3)]), np.array([3]), np.ones(3))
    assert shares(np.empty((0, 2), np.int64), np.empty(0, np.int64)).shape == (0, 2)
    assert shares(np.empty((2, 0), np.int64), np.arange(2)).shape == (2, 0)
