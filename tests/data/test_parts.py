"""Which blocks a process reads, and which of these it scores."""

import numpy as np
import pytest

from fairseq_knnlm.data.parts import ReadingPlan, blocks_before, contiguous_part
from fairseq_knnlm.errors import KnnlmError


def test_the_worked_example():
    """Blocks of 10 tokens, of which 4 to 6 are scored, with a cache of 15 tokens."""
    plan = ReadingPlan.of(np.full(8, 10), [(4, 6)], tokens_before=15)
    assert plan.scored == [(4, 6)] and plan.warm_up == [(2, 4)] and plan.ranges == [(2, 4), (4, 6)]
    assert plan.first_read == 20 and plan.scored_tokens == (40, 60) and plan.tokens == 40


@pytest.mark.parametrize(
    ("tokens", "first"), [(0, 4), (1, 3), (10, 3), (11, 2), (20, 2), (21, 1), (40, 0), (41, 0), (10_000, 0)]
)
def test_blocks_before(tokens, first):
    """Just as many blocks as hold so many tokens, and never more than there are."""
    assert blocks_before(np.full(8, 10), 4, tokens) == first


def test_blocks_of_different_sizes():
    """Before block 3 there are 7, 1 and 5 tokens, nearest last."""
    rows = np.array([7, 1, 5, 9, 2])
    assert [blocks_before(rows, 3, tokens) for tokens in (5, 6, 7, 13, 14)] == [2, 1, 0, 0, 0]
    plan = ReadingPlan.of(rows, [(3, 5)], tokens_before=6)
    assert plan.warm_up == [(1, 3)] and plan.first_read == 7 and plan.scored_tokens == (13, 24) and plan.tokens == 17


def test_several_ranges_read_nothing_twice():
    """As when a resumed dump has gaps: what is scored anyway need not be read before."""
    plan = ReadingPlan.of(np.full(12, 10), [(2, 4), (5, 6), (10, 12)], tokens_before=25)
    assert plan.warm_up == [(0, 2), (4, 5), (7, 10)]
    assert plan.ranges == [(0, 2), (2, 4), (4, 5), (5, 6), (7, 10), (10, 12)] and plan.tokens == 110


def test_nothing_is_read_before_where_nothing_remembers():
    plan = ReadingPlan.of(np.full(8, 10), [(4, 6)], tokens_before=0)
    assert plan.warm_up == [] and plan.first_read == 40


@pytest.mark.parametrize(("count", "parts"), [(10, 3), (3, 5), (0, 2), (7, 1)])
def test_parts_are_contiguous_and_nearly_equal(count, parts):
    ranges = [contiguous_part(count, parts, part) for part in range(parts)]
    assert [number for start, stop in ranges for number in range(start, stop)] == list(range(count))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_a_part_that_does_not_exist():
    with pytest.raises(KnnlmError, match="use 0 to 2"):
        contiguous_part(10, 3, 3)
