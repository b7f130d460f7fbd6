"""What is known before lists are read, and which lists are not worth a visit."""

import numpy as np
import pytest
import torch
from reference import similarities
from stores import keys_of

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.index import build_index, open_index
from fairseq_knnlm.index.list_files import open_lists
from fairseq_knnlm.search import ExactSearch, ListSearch
from fairseq_knnlm.search.early import EARLY_NAMES, VisitRule

TEMPERATURES = [2.0, 1.0, 4.0]


def engine_of(store: Datastore, rule: VisitRule | None = None, far: int = 0, metric: str = "l2") -> ListSearch:
    info = build_index(store, "IVF16,SQfp16", metric)
    return ListSearch(open_index(store, info), store, metric, 6, open_lists(store, info), far, rule=rule)


@pytest.fixture
def asked(lasting_store):
    store, rng = lasting_store(3000), np.random.default_rng(3)
    queries = keys_of(store)[rng.integers(0, 3000, 70)] + 0.2 * rng.normal(size=(70, store.dim))
    return store, queries.astype(np.float32), rng.integers(0, 50, 70)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_the_largest_similarity(asked, metric):
    store, queries, targets = asked
    expected = similarities(queries, keys_of(store), metric).max(axis=1)
    found = ExactSearch(store, metric).masses(queries, targets, TEMPERATURES)
    np.testing.assert_allclose(found.largest * TEMPERATURES[0], expected, rtol=1e-4, atol=1e-3)
    near = engine_of(store, metric=metric).masses(queries, targets, TEMPERATURES).largest * TEMPERATURES[0]
    assert (near <= expected + 1e-2).all() and np.median(expected - near) < 1e-2


def test_several_visitors_are_joined(asked):
    store, queries, targets = asked
    info = build_index(store, "IVF16,SQfp16", "l2")
    flags = (open_index(store, info), store, "l2", 6, open_lists(store, info))
    one, several = ListSearch(*flags), ListSearch(*flags, devices=["cpu", "cpu", "cpu"])
    ours, theirs = (engine.masses(queries, targets, TEMPERATURES, early=True) for engine in (several, one))
    for name in ("largest", "total", "early", "expected"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-6)


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_what_is_known_early(asked, metric):
    store, queries, targets = asked
    engine = engine_of(store, metric=metric)
    found = engine.masses(queries, targets, TEMPERATURES, early=True)
    np.testing.assert_allclose(np.exp(found.expected).sum(axis=1), 1, rtol=1e-5)
    assert found.early.shape == (70, len(EARLY_NAMES)) and np.isfinite(found.early).all()
    assert engine.masses(queries, targets, TEMPERATURES).early is None
    entropies = found.early[:, EARLY_NAMES.index("mixed values")]
    assert (entropies > 0).all() and (entropies <= np.log(50)).all()


def test_entropy_of_the_values_of_a_list(asked):
    store, _, _ = asked
    engine = engine_of(store)
    for block in engine.lists.stream(np.arange(16)):
        shares = np.unique(store.values[block.ids], return_counts=True)[1] / len(block.ids)
        ours = engine._estimates._entropies[block.number]
        assert float(ours) == pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-5)


def test_nothing_depends_on_the_target(asked):
    store, queries, targets = asked
    engine = engine_of(store, far=5)
    first, second = (engine.masses(queries, t, TEMPERATURES, early=True) for t in (targets, (targets + 7) % 50))
    assert not np.allclose(first.target, second.target)
    for name in ("largest", "total", "early", "expected"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


# --- leaving out visits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("far", [0, 5])
def test_a_rule_that_leaves_out_nothing_changes_nothing(asked, far):
    store, queries, targets = asked
    plain, ruled = engine_of(store, far=far), engine_of(store, VisitRule(-np.inf), far)
    for ours, theirs in zip(ruled.target_mass(queries, targets, [2.0]), plain.target_mass(queries, targets, [2.0])):
        np.testing.assert_array_equal(ours, theirs)


def test_visited_lists_exactly_and_the_others_as_gaussians(asked):
    """Against brute force over the lists that the rule leaves, and the estimates of those that it leaves out."""
    store, queries, targets = asked
    engine, keys = engine_of(store, VisitRule(np.log(0.1))), keys_of(store)
    plain = engine_of(store)
    found = engine.masses(queries, targets, [2.0], early=True)
    lists, distances = plain._nearest_lists(queries)
    visits = np.exp(found.expected) >= 0.1
    assert 0.1 < visits.mean() < 0.9
    estimates = engine._estimates.log_mass(torch.from_numpy(queries), lists, distances, 2.0).double().numpy()
    for row in range(20):
        blocks = list(plain.lists.stream(np.sort(lists[row][visits[row]])))
        ids = np.concatenate([block.ids for block in blocks])
        np.testing.assert_array_equal(np.sort(engine.visited(queries[row : row + 1])[1][0]), np.sort(ids))
        near = similarities(queries[row : row + 1], keys[ids])[0] / 2.0
        of_list = [np.logaddexp.reduce(near[np.isin(ids, block.ids)]) for block in blocks]
        offset = np.mean(of_list) - estimates[row][visits[row]].mean()
        far = estimates[row][~visits[row]] + offset
        expected = np.logaddexp.reduce(np.concatenate([near, far]))
        assert found.total[0, row] == pytest.approx(expected, abs=1e-3)


def test_sums_by_rank(asked):
    """The nearest list, the next, the next two, and the last two of six; together they are all."""
    store, queries, targets = asked
    engine = engine_of(store)
    found = engine.masses(queries, targets, TEMPERATURES, keep=True)
    assert found.ranked.shape == (2, 4, 70) and engine.masses(queries, targets, TEMPERATURES).ranked is None
    np.testing.assert_allclose(np.logaddexp.reduce(found.ranked[1]), found.total[0], rtol=1e-9)
    np.testing.assert_allclose(np.logaddexp.reduce(found.ranked[0]), found.target[0], rtol=1e-9)
    lists, _ = engine._nearest_lists(queries)
    for rank, columns in enumerate([[0], [1], [2, 3], [4, 5]]):
        part = np.full_like(lists, -1)
        part[:, : len(columns)] = lists[:, columns]
        alone = engine.visitors[0].masses(torch.from_numpy(queries), targets, part, [2.0], False)
        np.testing.assert_allclose(alone.total[0], found.ranked[1, rank], atol=1e-4)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("far", [0, 5])
def test_visits_do_not_depend_on_the_group(asked, far):
    store, queries, targets = asked
    engine = engine_of(store, VisitRule(-2.0, -0.3, 0.8, [0.1, -0.2, 0.3, 0.1], [-50.0, 1.0, 0.5, 2.0]), far)
    whole = engine.masses(queries, targets, TEMPERATURES)
    parts = [engine.masses(queries[r : r + 9], targets[r : r + 9], TEMPERATURES) for r in range(0, 70, 9)]
    for name in ("target", "total"):
        joined = np.concatenate([getattr(part, name) for part in parts], axis=1)
        np.testing.assert_allclose(joined, getattr(whole, name), rtol=1e-4, atol=1e-4)  # float32 products


def test_a_query_may_visit_nothing(asked):
    store, queries, targets = asked
    found = engine_of(store, VisitRule(1.0)).masses(queries, targets, [2.0])
    assert (found.largest == -np.inf).all() and np.isfinite(found.total).all()  # the lists take part as Gaussians


def test_an_index_of_others_has_no_estimates(asked):
    store, queries, targets = asked
    info = build_index(store, "IVF16,SQfp16", "l2")
    engine = ListSearch(open_index(store, info), store, "l2", 6)
    assert engine.early_names == () and engine.masses(queries, targets, [2.0], early=True).early is None
    with pytest.raises(KnnlmError, match="--knn-gate-skip needs an index"):
        ListSearch(open_index(store, info), store, "l2", 6, rule=VisitRule(0.0))
