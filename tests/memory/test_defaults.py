"""Flags that were not given: tuned values, of a preset, of the datastore."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from knn_flags import flags, index

from fairseq_knnlm.datastore.tuned import TunedValues, keep_tuned
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.index.list_files import LIST_SPREADS
from fairseq_knnlm.memory.defaults import (
    choose_cache_values,
    choose_values,
    find_tuned,
    parse_temperatures,
    parse_weights,
)
from fairseq_knnlm.memory.extent import why_not_all

OTHER_DAY = "2026-02-03T00:00:00+00:00"
VALUES = TunedValues(
    keys="a", weight=0.31, temperature=9.2, k=None, metric="l2", score="exact", beside=[], search={"nprobe": 32},
    split="valid", tokens=1000, perplexity=90.5, settings=9, when="2026-01-02T03:04:05+00:00",
)  # fmt: skip


class Store(SimpleNamespace):
    def __len__(self) -> int:
        return 1000


@pytest.fixture
def store(tmp_path) -> Store:
    """What looks like a datastore of 1,000 entries with the fingerprint a."""
    return Store(folder=tmp_path, fingerprint="a")


# --- presets --------------------------------------------------------------------------------------------------------


def test_tuned_values_serve_a_preset_that_says_nothing_of_the_mixture(store, caplog):
    keep_tuned(store.folder, VALUES)
    spreads = replace(index("IVF128,SQfp16"), files={LIST_SPREADS: "checksum"})
    with caplog.at_level("INFO"):
        values = choose_values(flags(preset="fast"), [store], [spreads])
    assert (values.k, values.weights, values.temperatures) == (None, [0.31], [9.2])
    assert values.far == [64] and "(with nprobe 32 and far 0)" in caplog.text


def test_the_preset_wins_over_tuned_values(store):
    keep_tuned(store.folder, replace(VALUES, k=64))
    values = choose_values(flags(preset="paper"), [store], [index("IVF16,PQ8")])
    assert (values.k, values.weights, values.temperatures) == (None, [0.25], [1.0])  # 1024 is above the 1,000 entries


# --- limits ---------------------------------------------------------------------------------------------------------


def test_k_is_all_where_it_can_be(store, caplog):
    caplog.set_level("INFO")
    for info in (None, index(None), index("IVF16,SQfp16"), index("PCA32,IVF16,PQ8")):
        assert choose_values(flags(temperature="1"), [store], [info]).k is None
    assert "k is" not in caplog.text
    assert choose_values(flags(temperature="1", score="index"), [store], [index("IVF16,PQ8")]).k == 1000
    assert "k is 1000: --knn-score index needs a number of neighbours" in caplog.text
    assert choose_values(flags(temperature="1"), [store], [index("HNSW8")]).k == 1000
    assert "HNSW8) has no inverted lists" in caplog.text
    assert why_not_all(flags(mask="exact"), [None]) == ""


def test_numbers():
    assert parse_weights("0.2", 2) == [0.2, 0.2] and parse_weights("0.1,0.3", 2) == [0.1, 0.3]
    assert parse_temperatures("5", 2) == [5.0, 5.0] == parse_temperatures(5.0, 2)
    assert parse_temperatures("5,7", 2) == [5.0, 7.0]
    for bad, message in (("5,7,9", "3 values for 2"), ("0", "above 0"), ("5,-1", "above 0"), ("hot", "takes numbers")):
        with pytest.raises(KnnlmError, match=message):
            parse_temperatures(bad, 2)


# --- temperature ----------------------------------------------------------------------------------------------------


def test_the_index_tells_the_temperature(store, caplog):
    caplog.set_level("INFO")
    values = choose_values(flags(), [store], [index("IVF16,PQ8", temperature=7.5)])
    assert (values.k, values.weights, values.temperatures) == (None, [0.25], [7.5])
    assert "temperature 7.5, from the distances between neighbours in this datastore; tune it with" in caplog.text
    caplog.clear()
    assert choose_values(flags(temperature="1"), [store], [index("IVF16,PQ8")]).temperatures == [1.0]
    assert not caplog.messages


# --- tuned values ---------------------------------------------------------------------------------------------------


def test_tuned_values_are_used_and_said(store, caplog):
    caplog.set_level("INFO")
    keep_tuned(store.folder, VALUES)
    values = choose_values(flags(), [store], [index("IVF16,PQ8")])
    assert (values.k, values.weights, values.temperatures) == (None, [0.31], [9.2])
    assert caplog.messages == [
        "lambda 0.31 and temperature 9.2 as tuned on valid (2026-01-02), knnlm tune --keep; give --knn-lambda or "
        "--knn-temperature for others"
    ]
    caplog.clear()
    values = choose_values(flags(temperature="3", nprobe=8), [store], [index("IVF16,PQ8")])
    assert (values.weights, values.temperatures) == ([0.31], [3.0])
    assert caplog.messages == [
        "lambda 0.31 as tuned on valid (2026-01-02), knnlm tune --keep (with nprobe 32); give --knn-lambda for others"
    ]
    caplog.clear()
    values = choose_values(flags(**{"lambda": "0", "temperature": "3"}), [store], [index("IVF16,PQ8")])
    assert (values.weights, values.temperatures) == ([0.0], [3.0]) and not caplog.messages


def test_a_tuned_number_of_neighbours(store, caplog):
    caplog.set_level("INFO")
    keep_tuned(store.folder, replace(VALUES, k=64))
    assert choose_values(flags(), [store], [index("HNSW8")]).k == 64
    assert "k 64 and lambda 0.31 and temperature 9.2 as tuned" in caplog.text
    assert choose_values(flags(k="100"), [store], [index("HNSW8")]).weights == [0.31]  # a number, too
    keep_tuned(store.folder, replace(VALUES, weight=0.4, when=OTHER_DAY))  # with all, and newer
    assert choose_values(flags(), [store], [index("IVF16,PQ8")]).k is None
    assert choose_values(flags(), [store], [index("HNSW8")]).k == 64  # where all cannot be


@pytest.mark.parametrize(
    ("given", "kept", "why"),
    [
        ({"metric": "ip"}, {}, "they are for --knn-metric l2"),
        ({"k": "64"}, {}, "they are for --knn-k all"),
        ({"k": "all"}, {"k": 32}, "they are for --knn-k 32"),
        ({"score": "index"}, {}, "they are for --knn-score exact"),
        ({"cache_size": 10}, {}, "they are for a mixture without a cache"),
        ({}, {"cache_size": 10}, "they are for a mixture with a cache"),
        ({}, {"beside": ["b"]}, "they are for a mixture with other datastores"),
    ],
)
def test_values_for_something_else_are_not_used(store, caplog, given, kept, why):
    caplog.set_level("INFO")
    keep_tuned(store.folder, replace(VALUES, **kept))
    info = replace(index("IVF16,PQ8"), metric=given.get("metric", "l2"))
    values = choose_values(flags(**given), [store], [info])
    assert (values.weights, values.temperatures) == ([0.25], [7.5])
    assert f"values that knnlm tune --keep found are not used: {why}; tune this mixture" in caplog.text


def test_several_datastores(tmp_path):
    a, b = (Store(folder=tmp_path / name, fingerprint=name) for name in "ab")
    for store in (a, b):
        store.folder.mkdir()
    keep_tuned(a.folder, replace(VALUES, beside=["b"], weight=0.2))
    assert find_tuned(flags(), [a, b], {True})[1] == f"there are none for {b.folder}"
    keep_tuned(b.folder, replace(VALUES, keys="b", beside=["a"], weight=0.3, temperature=4.0))
    for order in ([a, b], [b, a]):
        found, why_not = find_tuned(flags(), order, {True})
        assert [each.keys for each in found] == [each.fingerprint for each in order] and not why_not
    assert find_tuned(flags(), [a], {True})[1] == "they are for a mixture with other datastores"
    keep_tuned(b.folder, replace(VALUES, keys="b", beside=["a"], when=OTHER_DAY))
    assert find_tuned(flags(), [a, b], {True})[1] == "they were not tuned together"


def test_the_cache(store, caplog):
    caplog.set_level("INFO")
    assert choose_cache_values(flags(cache_size=10), [], None) == (0.1, 0.1)
    keep_tuned(store.folder, replace(VALUES, cache_size=10, cache_weight=0.2, theta=0.3))
    assert choose_cache_values(flags(cache_size=10), [store], None) == (0.2, 0.3)
    assert caplog.messages == ["cache lambda 0.2 and cache theta 0.3 as tuned on valid (2026-01-02), knnlm tune --keep"]
    assert choose_cache_values(flags(cache_size=12, cache_theta=0.0), [store], None) == (0.2, 0.0)
    assert "with --knn-cache-size 10" in caplog.messages[-1]
    assert choose_cache_values(flags(cache_size=10), [store], 64) == (0.1, 0.1)
    assert choose_cache_values(flags(cache_size=10, preset="paper"), [store], None) == (0.1, 0.1)
