"""The benchmark measures what it says: its plain methods agree with ours, and its tables can be read."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from stores import make_store

from benchmarks import __main__ as benchmark
from benchmarks import build, dump, full_size, neighbors, original, profile, search
from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.index import build_index, build_index_if_missing, index_file, list_indexes
from fairseq_knnlm.memory import DatastoreMemory
from fairseq_knnlm.memory.engines import make_engine


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = make_store(tmp_path_factory.mktemp("bench") / "store", 3000)
    build_index(store, "paper", "l2")
    build_index(store, "IVF32(IVF4,Flat),SQfp16", "l2", name="auto")
    return store


@pytest.fixture
def queries(store):
    rng = np.random.default_rng(1)
    keys = store.gather_keys(rng.integers(0, len(store), 80)).astype(np.float32)
    return torch.from_numpy(keys + 0.1 * rng.normal(size=keys.shape).astype(np.float32))


def test_the_published_method_equals_ours(store, queries, tmp_path, monkeypatch):
    original.write_raw(store, tmp_path / "raw", index_file(store, "paper"))
    targets = torch.from_numpy(store.values[: len(queries)].astype(np.int64))
    monkeypatch.setattr(original, "K", 200)
    plain = original.PlainKNN(tmp_path / "raw").target_log_probs(queries, targets, 3.0)
    info = build_index_if_missing(store, "paper", "l2")
    engine = make_engine(store, info, 200, "l2", "index", "exact", original.NPROBE)
    ours = DatastoreMemory(store, engine, 200, 0.25, 3.0, "l2").target_log_probs(queries, targets)
    assert ours.isfinite().any()
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_search_rows_and_tables(store, queries, monkeypatch):
    monkeypatch.setattr(search, "WARM_UP", 1)
    monkeypatch.setattr(search, "TIMED", 3)
    monkeypatch.setattr(search, "K", 100)
    monkeypatch.setattr(original, "K", 100)
    targets = torch.from_numpy(store.values[: len(queries)].astype(np.int64))
    rows = search._measure_store(store, search.paper_index(store, store), queries, targets)
    assert rows["ours, k = 100"]["recall"] == pytest.approx(1.0)  # all 32 clusters are visited
    assert 0 < rows["original, k = 1024"]["recall"] <= 1
    rows["small"] = search.measure_of_all(store, queries, targets, far=4)
    result = {"about": {"part": 80}, "search": {"3,000": rows}, "dump": {"forward": 10.0, "dump": 9.0, "ratio": 0.9}}
    page = benchmark.pages(json.loads(json.dumps(result)), markdown=True)
    assert "| 3,000 | ours, k = all, 32 lists + 64 far |" in page and "| 3,000 | small |  |" in page
    assert "| dump / forward pass | 0.900 |" in page


def test_building_the_indexes(store, tmp_path, monkeypatch):
    """The datastore's own indexes stay as they are, and one that it lacks is kept."""
    before, bare = sorted(store.folder.rglob("*")), make_store(tmp_path / "bare", 3000)

    def run(_, __, folder, ___, name):
        build_index(Datastore(folder), name, "l2")
        return {"peak_memory": 5}

    monkeypatch.setattr(build, "run", run)
    setting = SimpleNamespace(work=tmp_path, open_datastore=lambda: store, open_compact=lambda: bare)
    result = build.measure(setting)
    assert sorted(store.folder.rglob("*")) == before and list(tmp_path.iterdir()) == [bare.folder]
    assert [info.name for info in list_indexes(bare)] == ["auto"]
    assert result["indexes"]["paper"]["factory"].endswith("PQ64") and result["indexes"]["paper"]["bytes"] > 0
    header, lines = build.table(json.loads(json.dumps(result)))
    assert [len(line) for line in lines] == [len(header)] * 3


def test_profile_of_a_search(store, tmp_path):
    setting = SimpleNamespace(
        work=tmp_path, open_datastore=lambda: store, open_compact=lambda: store, eval_lm=lambda *_: None
    )
    (tmp_path / "valid").symlink_to(store.folder)
    functions = [getattr(*place) for place in profile.STEPS.values()]
    result = profile.measure(setting)
    assert result["queries"] == len(store) and set(result["steps"]) == {*profile.STEPS, profile.REST}
    assert [getattr(*place) for place in profile.STEPS.values()] == functions
    header, lines = profile.table(json.loads(json.dumps(result)))
    assert [len(line) for line in lines] == [len(header)] * 5


def test_full_size_in_small(store, tmp_path, monkeypatch):
    """Keys with noise go through the real writer; sums agree with exact search where every list is visited."""
    entries = 7000  # more than twice the source
    made = full_size.dump(store, tmp_path / "store", entries, 32)
    whole = Datastore(tmp_path / "store")
    assert (len(whole), whole.dim, whole.manifest.source_dim, made["bytes"]) == (entries, 32, 1024, entries * 34)
    np.testing.assert_array_equal(whole.values[3000:6000], store.values)
    first, second = whole.read_keys(0, 3000), whole.read_keys(3000, 6000)
    moved = ((first - second) ** 2).sum(axis=1)
    assert 0 < np.median(moved) < np.median(((first[1:] - first[:-1]) ** 2).sum(axis=1))
    monkeypatch.setattr(full_size, "build_index", lambda store, *_: build_index(store, "IVF32,SQ8", "l2"))
    scored = full_size.score(store, store, tmp_path / "store", 8, 8, 9.0)
    checked = full_size.check(store, store, tmp_path / "store", 32, 0, 9.0, 20)
    assert scored["queries"] == len(store) and checked["recall of the 1,024 nearest"] > 0.99
    assert checked["mean difference of p, visited"] < 1e-4
    results = {
        "dump": made, "build": full_size.build(tmp_path / "store"), "score": scored, "check": checked,
        "disk": full_size.disk(store, store, tmp_path / "store", 8, 8, 9.0),
    }  # fmt: skip
    assert results["disk"]["slow"]["bytes_read"] > 0
    growth = {"growth": {"rows": {"700": {"us": scored["seconds_of_search"] / len(store) * 1e6 / 10}}}}
    (tmp_path / "speed.json").write_text(json.dumps(growth))
    for step in results.values():
        step |= {"seconds": 3.0, "peak_memory": 1 << 30}
    (tmp_path / "scale.json").write_text(json.dumps(results))
    full_size.write_page(tmp_path / "scale.json")
    page = (tmp_path / "scale.md").read_text()
    assert "| build | 3 s | 1.00 GiB |" in page and "With every read slowed down to 500 MB a second, 60 queries" in page
    assert "10.0 times as long as with 700 entries (entries to the power of 1.00)" in page


def test_the_cost_of_a_table_of_neighbours():
    result = {"entries": 10_000_000, "dim": 256, "processor_seconds_per_million": 1234.5}
    header, lines = neighbors.table(json.loads(json.dumps(result)))
    assert [len(line) for line in lines] == [len(header)] * 2
    assert lines[0][1] == "1,234" and lines[1][1] == "196,364 to 261,818"


def test_a_dump_beside_the_forward_pass(corpus, adaptive_model):
    """Of a text of one group, which is for warming up: it runs, and then says that there is nothing to time."""
    with pytest.raises(SystemExit, match="train is too short to time a dump"):
        dump.measure(corpus, adaptive_model, "train", 1, tokens_per_sample=64, context_window=32)
