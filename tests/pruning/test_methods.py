"""Each method against a few lines of NumPy, on a datastore of a few hundred entries and a handful of lists."""

import numpy as np
import pytest
import torch
from stores import keys_of, make_store

from fairseq_knnlm.index.list_files import open_lists
from fairseq_knnlm.pruning import PruneOptions, averaging, prune
from fairseq_knnlm.pruning import list_walk as walking
from fairseq_knnlm.pruning.list_walk import ListWalk, parts_of_runs
from fairseq_knnlm.pruning.posterior import PosteriorOptions, posterior

ENTRIES = 700


def digamma(numbers):
    return torch.digamma(torch.as_tensor(numbers, dtype=torch.double)).numpy()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("pruning") / "store", ENTRIES, "float32", of_centre=True, shard=250)


@pytest.fixture(scope="module")
def lists(store):
    """The entries of each list."""
    found = open_lists(store, ListWalk(store, "IVF4,Flat").info)
    return [np.sort(ids) for ids in np.split(found.file.ids(), found.file.starts[1:-1]) if len(ids)]


def distances_of(store):
    keys = keys_of(store).astype(np.float64)
    return ((keys[:, None] - keys) ** 2).sum(axis=2)


def pruned(store, folder, keep, method, **options):
    """Entries that stayed, and their weights."""
    index = None if method == "random" else "IVF4,Flat"
    found = prune(store, PruneOptions(keep, method, index=index, **options), folder)
    np.testing.assert_array_equal(found.values, store.values[found.positions])
    np.testing.assert_array_equal(keys_of(found), keys_of(store)[found.positions])
    return np.array(found.positions), found.weights


def test_random_draws_are_nested(store, tmp_path):
    few, weights = pruned(store, tmp_path / "few", 0.1, "random")
    many, _ = pruned(store, tmp_path / "many", 0.5, "random")
    other, _ = pruned(store, tmp_path / "other", 0.1, "random", seed=2)
    assert weights is None and len(few) == 70 and len(many) == 350
    assert set(few) < set(many) and set(few) != set(other)


def merged(store, lists, keep, neighbors=None):
    """Merge the two nearest entries of the same value and list that are left, until as few are left as wanted."""
    distances, values = distances_of(store), store.values
    weights = np.ones(ENTRIES)
    allowed = np.zeros((ENTRIES, ENTRIES), bool)
    for ids in lists:
        allowed[np.ix_(ids, ids)] = True
    if neighbors is not None:
        inside = np.where(allowed & ~np.eye(ENTRIES, dtype=bool), distances, np.inf)
        near = inside <= np.sort(inside, axis=1)[:, neighbors - 1 : neighbors]
        allowed &= near | near.T
    allowed &= (values[:, None] == values) & ~np.eye(ENTRIES, dtype=bool)
    distances = np.where(allowed, distances, np.inf)
    while (weights > 0).sum() > round(keep * ENTRIES) and np.isfinite(distances).any():
        one, other = sorted(np.unravel_index(distances.argmin(), distances.shape))
        stays, goes = (other, one) if weights[other] > weights[one] else (one, other)
        weights[stays] += weights[goes]
        weights[goes] = 0
        distances[goes] = distances[:, goes] = np.inf
    return weights


@pytest.mark.parametrize(("keep", "neighbors"), [(0.9, None), (0.5, None), (0.2, None), (0.7, 3), (1.0, None)])
def test_merging(store, lists, tmp_path, keep, neighbors):
    expected = merged(store, lists, keep, neighbors)
    kept, weights = pruned(store, tmp_path / "out", keep, "merge", neighbors=neighbors)
    np.testing.assert_array_equal(kept, np.flatnonzero(expected))
    np.testing.assert_array_equal(weights, expected[kept])
    assert weights.sum() == ENTRIES


def test_where_merging_is_not_enough_the_lightest_go(store, lists, tmp_path):
    everything = merged(store, lists, 0.0)
    left = int((everything > 0).sum())
    kept, weights = pruned(store, tmp_path / "out", (left - 20) / ENTRIES, "merge")
    assert len(kept) == left - 20 and weights.sum() < ENTRIES
    np.testing.assert_array_equal(weights, everything[kept])
    assert np.delete(everything, kept).max() <= weights.min()


def test_merging_what_was_merged_before(store, tmp_path):
    """Weights add up, and positions are those in the corpus."""
    first = prune(store, PruneOptions(0.5, "merge"), tmp_path / "first")
    second = prune(first, PruneOptions(0.5, "merge"), tmp_path / "second")
    assert second.weights.sum() == ENTRIES and set(second.positions) < set(first.positions)
    assert second.manifest.source["subsample"]["of_corpus"] == ENTRIES
    third = prune(second, PruneOptions(0.5, "random"), tmp_path / "third")
    places = np.searchsorted(second.positions, third.positions)
    np.testing.assert_array_equal(third.weights, second.weights[places])  # which a random part keeps


def test_pieces_of_large_lists(store, monkeypatch, tmp_path):
    """With room for few entries at once: every merge is still one of the same list and value."""
    monkeypatch.setattr(walking, "MOST_ENTRIES", 8)
    monkeypatch.setattr(parts_of_runs, "__defaults__", (8, None))
    kept, weights = pruned(store, tmp_path / "out", 0.4, "merge", neighbors=600)  # another setting, so nothing is kept
    assert weights.sum() == ENTRIES and len(kept) == 280
    kept_values = np.bincount(store.values[kept], weights)
    np.testing.assert_array_equal(kept_values, np.bincount(store.values))


def averaged(store, groups, keep):
    """Merge the two of the same value and group that add least to the squared distances from their means."""
    keys, values = keys_of(store).astype(np.float64), store.values
    weights, members = np.ones(ENTRIES), {number: [number] for number in range(ENTRIES)}
    together = np.zeros((ENTRIES, ENTRIES), bool)
    for ids in groups:
        together[np.ix_(ids, ids)] = True
    together &= (values[:, None] == values) & ~np.eye(ENTRIES, dtype=bool)
    costs = np.where(together, ((keys[:, None] - keys) ** 2).sum(axis=2) / 2, np.inf)
    while len(members) > round(keep * ENTRIES) and np.isfinite(costs).any():
        one, other = sorted(np.unravel_index(costs.argmin(), costs.shape))
        stays, goes = (other, one) if weights[other] > weights[one] else (one, other)
        members[stays] += members.pop(goes)
        weights[stays] += weights[goes]
        weights[goes] = 0
        keys[stays] = keys_of(store)[members[stays]].astype(np.float64).mean(axis=0)
        costs[goes] = costs[:, goes] = np.inf
        alive = np.flatnonzero(together[stays] & (weights > 0))
        added = weights[stays] * weights[alive] / (weights[stays] + weights[alive])
        costs[stays, alive] = costs[alive, stays] = added * ((keys[alive] - keys[stays]) ** 2).sum(axis=1)
    return weights, keys


@pytest.mark.parametrize("at_once", [1, 2, 16])
@pytest.mark.parametrize("keep", [0.9, 0.4, 0.15, 1.0])
def test_averaging(store, lists, monkeypatch, tmp_path, keep, at_once):
    monkeypatch.setattr("fairseq_knnlm.pruning.selection.LISTS_AT_ONCE", at_once)
    walk = ListWalk(store, "IVF4,Flat")
    groups = [np.concatenate([lists[number] for number in group]) for group in walk.near_lists(at_once)]
    assert len(groups) == {1: 4, 2: 2, 16: 1}[at_once]
    weights, keys = averaged(store, groups, keep)
    found = prune(store, PruneOptions(keep, "average", index="IVF4,Flat"), tmp_path / "out")
    np.testing.assert_array_equal(found.positions, np.flatnonzero(weights))
    np.testing.assert_array_equal(found.weights, weights[found.positions])
    np.testing.assert_allclose(keys_of(found), keys[found.positions], rtol=1e-5, atol=1e-6)


def test_averages_of_what_was_averaged_before(store, tmp_path, monkeypatch):
    """Weights take part in the means: the mean of all keys stays what it was."""
    monkeypatch.setattr(averaging, "KEYS_AT_ONCE", 50)  # several parts
    first = prune(store, PruneOptions(0.5, "average"), tmp_path / "first")
    second = prune(first, PruneOptions(0.5, "average"), tmp_path / "second")
    assert second.weights.sum() == ENTRIES and set(second.positions) < set(first.positions)
    mean = np.average(keys_of(second), axis=0, weights=second.weights)
    np.testing.assert_allclose(mean, keys_of(store).mean(axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_averages_of_equal_entries_are_these_entries(tmp_path, dtype):
    """Every entry three times: a third of them, each with the weight 3, is the same datastore."""
    store = make_store(tmp_path / "thrice", 100, dtype, times=3)
    found = prune(store, PruneOptions(1 / 3, "average"), tmp_path / "out")
    np.testing.assert_array_equal(found.weights, np.full(100, 3))
    np.testing.assert_array_equal(found.positions, np.arange(100))
    np.testing.assert_array_equal(found.read_stored(0, 100), store.read_stored(0, 100))


def test_parts_of_runs():
    assert list(parts_of_runs(np.array([2, 4, 13]), 5)) == [(0, 4, 0, 1), (4, 8, 0, 2), (8, 13, 1, 2)]
    assert list(parts_of_runs(np.array([3, 6, 7]), 5)) == [(0, 3, 0, 1), (3, 7, 0, 1)]
    few_together = parts_of_runs(np.array([2, 3, 5, 10, 11]), 5, together=3)
    assert list(few_together) == [(0, 3, 0, 1), (3, 5, 0, 1), (5, 10, 0, 1), (10, 11, 0, 1)]
    rng = np.random.default_rng(0)
    ends = np.cumsum(rng.integers(1, 30, 50))
    parts = list(parts_of_runs(ends, 16))
    assert [first for first, *_ in parts] == [0, *(stop for _, stop, *_ in parts[:-1])] and parts[-1][1] == ends[-1]
    assert max(stop - first for first, stop, *_ in parts) <= 16


def retrieved(store, lists, neighbors, window):
    """How often each entry is among the nearest of its list and has the value of the query."""
    distances, counts = distances_of(store), np.zeros(ENTRIES)
    for ids in lists:
        for query in ids:
            others = ids[np.abs(ids - query) > window]
            near = others[np.argsort(distances[query, others], kind="stable")[:neighbors]]
            counts[near] += store.values[near] == store.values[query]
    return counts


@pytest.mark.parametrize(("neighbors", "window"), [(5, 0), (20, 40), (2000, 10)])
def test_counting_what_is_retrieved(store, lists, tmp_path, neighbors, window):
    expected = retrieved(store, lists, neighbors, window)
    kept, weights = pruned(store, tmp_path / "out", 0.3, "retrieved", neighbors=neighbors, window=window)
    assert weights is None and len(kept) == 210
    assert np.delete(expected, kept).max() <= expected[kept].min() and expected[kept].min() < expected.max()


def learned(store, queries, lists_of_queries, lists, alpha, updates, temperature, window, own):
    """lambda of every entry: the updates of the whole posterior, as the paper has them."""
    keys, query_keys = keys_of(store).astype(np.float64), keys_of(queries).astype(np.float64)
    distances = ((query_keys[:, None] - keys) ** 2).sum(axis=2)
    allowed = queries.values[:, None] == store.values
    allowed &= np.array([np.isin(np.arange(ENTRIES), lists[number]) for number in lists_of_queries])
    if own:
        allowed &= np.abs(np.arange(len(queries))[:, None] - np.arange(ENTRIES)) > window
    posterior = np.ones(ENTRIES)
    for update in range(updates):
        kernel = np.where(allowed, np.exp(digamma(posterior) - distances / temperature), 0)
        totals = kernel.sum(axis=1, keepdims=True)
        shares = np.divide(kernel, totals, out=np.zeros_like(kernel), where=totals > 0)
        rho = (update + 1) ** -0.8
        posterior = (1 - rho) * posterior + rho * (alpha + ENTRIES * shares.mean(axis=0))
    return posterior


@pytest.mark.parametrize(("alpha", "updates", "temperature"), [(0.2, 1, 20.0), (0.1, 6, 20.0), (0.9, 4, 3.0)])
def test_a_learned_posterior(store, lists, tmp_path, alpha, updates, temperature):
    number_of = np.empty(ENTRIES, int)
    for number, ids in enumerate(lists):
        number_of[ids] = number
    expected = learned(store, store, number_of, lists, alpha, updates, temperature, 3, True)
    options = {"alpha": alpha, "updates": updates, "temperature": temperature, "window": 3}
    kept, weights = pruned(store, tmp_path / "out", 0.3, "learned", **options)
    np.testing.assert_allclose(weights, expected[kept], rtol=2e-3)
    assert np.delete(expected, kept).max() <= expected[kept].min() * (1 + 2e-3)
    _, none = pruned(store, tmp_path / "without", 0.3, "learned", weights=False, **options)
    assert none is None


def test_two_updates_by_hand():
    """Two entries of one value, one query that is as far from both, but counted for a third: lambda to the digit."""
    options = PosteriorOptions(0.5, 2, 1.0, None)
    distances, allowed = torch.tensor([[0.0, np.log(3)]]), torch.ones(1, 2, dtype=torch.bool)
    # First update, rho 1: shares 3/4 and 1/4. Second, rho 2^-0.8: shares as 3 exp(digamma(1.25)) to exp(digamma(0.75)).
    scores = np.array([3 * np.exp(digamma(1.25)), np.exp(digamma(0.75))])
    rho = 2**-0.8
    expected = (1 - rho) * np.array([1.25, 0.75]) + rho * (0.5 + scores / scores.sum())
    np.testing.assert_allclose(posterior(distances.float(), allowed, torch.ones(1), options), expected, rtol=1e-5)


@pytest.mark.parametrize("method", ["retrieved", "learned"])
def test_other_text_as_queries(store, lists, tmp_path, method):
    """Queries go to the list that they are nearest to, and nothing of it is their own."""
    queries = make_store(tmp_path / "queries", 300, "float32", of_centre=True, text=7)
    walk = ListWalk(store, "IVF4,Flat")
    nearest = walk.find_lists(queries)
    centroids = walk._index.quantizer.reconstruct_n(0, 4)
    keys = keys_of(queries)
    np.testing.assert_array_equal(nearest, ((keys[:, None] - centroids) ** 2).sum(axis=2).argmin(axis=1))
    members = np.split(open_lists(store, walk.info).file.ids(), open_lists(store, walk.info).file.starts[1:-1])
    if method == "learned":
        options = {"alpha": 0.3, "updates": 3, "temperature": 20.0}
        expected = learned(store, queries, nearest, members, 0.3, 3, 20.0, 0, False)
    else:
        options, expected = {"neighbors": 6}, np.zeros(ENTRIES)
        distances = ((keys[:, None].astype(np.float64) - keys_of(store)) ** 2).sum(axis=2)
        for query, number in enumerate(nearest):
            near = members[number][np.argsort(distances[query, members[number]])[:6]]
            expected[near] += store.values[near] == queries.values[query]
    kept, weights = pruned(store, tmp_path / "out", 0.3, method, queries=queries, **options)
    assert np.delete(expected, kept).max() <= expected[kept].min() * (1 + 2e-3)
    if method == "learned":
        np.testing.assert_allclose(weights, expected[kept], rtol=2e-3)
