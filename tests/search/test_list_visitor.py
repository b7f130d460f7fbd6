"""Several visitors, each with a range of the lists, and lists that stay in memory: the same as one that reads them."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from stores import make_store
from test_list_blocks import CODES, ask, engine_of

from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.index import build_index, open_index
from fairseq_knnlm.index.list_files import open_lists
from fairseq_knnlm.search import ListSearch
from fairseq_knnlm.search.list_blocks import ResidentLists
from fairseq_knnlm.search.visitor import list_ranges


def split_engine(store, parts, metric="l2", far=0, resident=False, **options) -> ListSearch:
    info = build_index(store, f"IVF16,{CODES[store.manifest.key_dtype]}", metric)
    lists, devices = open_lists(store, info), ["cpu"] * parts
    return ListSearch(open_index(store, info), store, metric, 5, lists, far, devices, resident, **options)


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize(("parts", "resident"), [(1, True), (2, False), (3, True), (5, False)])
def test_any_number_of_visitors_gives_the_same(lasting_store, metric, dtype, parts, resident):
    store = lasting_store(3000, dtype)
    one, several = engine_of(store, metric, far=6), split_engine(store, parts, metric, 6, resident)
    assert isinstance(several.lists, ResidentLists) == resident
    queries, targets = ask(store)
    ours, theirs = (engine.target_mass(queries, targets, [2.0, 4.0]) for engine in (several, one))
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    for k in (1, 20, 2000):
        (distances, ids), (expected, expected_ids) = several.search(queries, k), one.search(queries, k)
        np.testing.assert_allclose(distances, expected, rtol=1e-6)
        assert (np.sort(ids) == np.sort(expected_ids)).mean() > 0.99  # ties
    for row in (0, 30):
        query = queries[row : row + 1]
        (distances, ids), (expected, expected_ids) = (engine.visited(query) for engine in (several, one))
        order, expected_order = ids[0].argsort(), expected_ids[0].argsort()
        np.testing.assert_array_equal(ids[0, order], expected_ids[0, expected_order])
        np.testing.assert_allclose(distances[0, order], expected[0, expected_order], rtol=1e-5, atol=1e-5)
        (values, masses), (expected_values, expected) = (e.visited_masses(query, 3.0) for e in (several, one))
        order, expected_order = np.lexsort([masses, values]), np.lexsort([expected, expected_values])
        np.testing.assert_array_equal(values[order], expected_values[expected_order])
        np.testing.assert_allclose(masses[order], expected[expected_order], rtol=1e-5, atol=1e-5)


def test_ranges_are_contiguous_and_balanced(lasting_store):
    store = lasting_store(3000, "float16")
    info = build_index(store, "IVF16,SQfp16", "l2")
    lists = open_lists(store, info)
    for parts in (1, 2, 5, 16, 40):
        ranges = list_ranges(lists, parts)
        assert len(ranges) == parts and ranges[0][0] == 0 and ranges[-1][1] == 16
        assert all(one[1] == next_one[0] for one, next_one in pairwise(ranges))
        entries = [int(lists.file.starts[stop] - lists.file.starts[first]) for first, stop in ranges]
        assert sum(entries) == 3000 and max(entries) <= 3000 / parts + np.diff(lists.file.starts).max()


def test_half_precision_is_close(lasting_store):
    """As on a GPU with a model in half precision: sums stay single, so that p differs in the third digit at most."""
    store = lasting_store(3000, "float16")
    queries, targets = ask(store)
    exact, half = engine_of(store), split_engine(store, 1, precision=torch.float16)
    p, p_half = (np.exp(np.subtract(*engine.target_mass(queries, targets, [2.0]))) for engine in (exact, half))
    np.testing.assert_allclose(p_half, p, rtol=1e-2, atol=1e-4)
    assert not np.array_equal(p_half, p)  # or half precision was not used


def test_several_devices_need_our_own_lists(tmp_path):
    store = make_store(tmp_path / "store", 2000)
    index = open_index(store, build_index(store, "IVF16,SQfp16", "l2"))
    with pytest.raises(KnnlmError, match="several devices need an index that this release built"):
        ListSearch(index, store, "l2", 4, devices=["cpu", "cpu"])
