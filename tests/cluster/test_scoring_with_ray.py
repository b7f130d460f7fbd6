"""Commands whose search runs on a cluster: the same numbers as without."""

import importlib.util

import numpy as np
import pytest
import torch
from commands import error_of, eval_lm_here, make_table, sentence_of

from fairseq_knnlm import KNNLM
from fairseq_knnlm.cluster import connection, ray_search
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.memory import Memory, MemoryScores
from fairseq_knnlm.mixture import ahead_of_model

INDEX = ["--knn-index", "IVF16,SQfp16", "--knn-nprobe", "4", "--max-tokens", "256"]


@pytest.fixture
def on_cluster(cluster, pooled) -> list:
    return ["--knn-engine", "ray", "--knn-ray-address", cluster.address]


@pytest.mark.parametrize("flags", [["--knn-k", "all", "--knn-far", "4"], ["--knn-k", "16"]])
def test_scoring(corpus, adaptive_model, dump, evaluate, on_cluster, flags, monkeypatch, tmp_path):
    """While the model works on the next batches; what is saved is the same, too."""
    both = ["--knn-datastore", dump("train"), *INDEX, *flags]
    expected = evaluate(corpus, adaptive_model, *both, "--knn-save", tmp_path / "local")
    monkeypatch.setattr(ray_search, "VISITS_OF_A_LIST", 75)  # 300 queries
    begun = []
    begin = ahead_of_model.SearchesAhead.begin
    monkeypatch.setattr(ahead_of_model.SearchesAhead, "begin", lambda self, *a: (begun.append(1), begin(self, *a)))
    found = evaluate(corpus, adaptive_model, *both, *on_cluster, "--knn-save", tmp_path / "spread")
    assert len(begun) >= 3 and "are served by 3 actors on 3 nodes" in found.log
    np.testing.assert_allclose(found.scores, expected.scores, atol=2e-4)
    assert abs(found.loss - expected.loss) < 1e-5
    # Ranks of lists, which --knn-gate-skip is learnt from, are kept by the local engine only.
    for path in sorted(p for p in (tmp_path / "local").glob("*.npy") if not p.stem.endswith(("expected", "ranked"))):
        one, other = (np.load(tmp_path / run / path.name).astype(np.float64) for run in ("local", "spread"))
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)


def test_generation_and_neighbours_in_a_program(corpus, adaptive_model, dump, cluster, pooled):
    settings = {"datastore": dump("train"), "index": "IVF16,SQfp16", "nprobe": 4, "temperature": 5}
    folder, name = adaptive_model.parent, adaptive_model.name
    here = KNNLM.from_pretrained(folder, name, corpus, **settings)
    spread = KNNLM.from_pretrained(folder, name, corpus, engine="ray", ray_address=cluster.address, **settings)
    text = (corpus.parent / "valid.txt").read_text().splitlines()[0]
    np.testing.assert_allclose(spread.score(text).log_probs, here.score(text).log_probs, atol=1e-5)
    assert spread.sample(text, tokens=5, seed=1) == here.sample(text, tokens=5, seed=1)
    assert [n.entry for n in spread.neighbors(text)] == [n.entry for n in here.neighbors(text)]


def test_tables_of_neighbours(dump, cluster, pooled, tmp_path):
    flags = ["--k", "4", "--index", "IVF16,SQfp16"]
    assert make_table(dump("train"), dump("valid"), tmp_path / "here", *flags) == 0
    spread = ["--engine", "ray", "--ray-address", cluster.address]
    assert make_table(dump("train"), dump("valid"), tmp_path / "spread", *flags, *spread) == 0
    for kind in ("ids", "distances"):
        names = sorted(path.name for path in (tmp_path / "here").glob(f"*{kind}*.npy"))
        assert names
        one, other = (np.concatenate([np.load(tmp_path / run / name) for name in names]) for run in ("here", "spread"))
        if kind == "ids":
            assert (one == other).mean() > 0.98  # ties
        else:
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--knn-ray-address", "local"], "--knn-ray-address does nothing without --knn-engine ray"),
        (["--knn-engine", "ray", "--knn-ray-address", "x"], "--knn-ray-address takes auto"),
        (["--knn-engine", "ray", "--knn-mask", "exact"], "--knn-mask exact needs every key"),
        (["--knn-engine", "ray", "--knn-score", "index", "--knn-k", "4"], "--knn-score index needs every key"),
    ],
)
def test_flags_that_make_no_sense(corpus, adaptive_model, dump, flags, expected):
    words = ["--gen-subset", "valid", "--knn-datastore", dump("train"), *flags]
    assert expected in sentence_of(eval_lm_here, corpus, adaptive_model, *words)


def test_flags_without_a_datastore(corpus, adaptive_model, tmp_path, capsys):
    alone = ["--gen-subset", "valid", "--knn-engine", "ray"]
    assert "does nothing without --knn-datastore" in sentence_of(eval_lm_here, corpus, adaptive_model, *alone)
    dumping = [*alone, "--knn-dump", tmp_path / "store"]
    assert "knnlm cluster dump" in sentence_of(eval_lm_here, corpus, adaptive_model, *dumping)


def test_codes_instead_of_keys(corpus, adaptive_model, dump, on_cluster):
    """Their lists can be visited; the neighbours in them are FAISS's to find."""
    words = ["--gen-subset", "valid", "--knn-datastore", dump("train"), "--knn-index", "IVF16,PQ8", "--knn-k", "8"]
    assert "holds codes instead of keys" in sentence_of(eval_lm_here, corpus, adaptive_model, *words, *on_cluster)


# --- no cluster -------------------------------------------------------------------------------------------------------


def test_no_cluster(monkeypatch):
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'fairseq-knnlm[ray]'")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(KnnlmError, match=r"no Ray cluster answers at 127.0.0.1:1 .*ray start --head"):
        connection.connect("127.0.0.1:1")

    def nobody(**_):
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", nobody)
    with pytest.raises(KnnlmError, match="there is no Ray cluster on this machine; start one with ray start --head"):
        connection.connect("auto")

    def other_versions(**_):
        raise RuntimeError("Version mismatch: The cluster was started with:\n  Ray: 2.1\n  Python: 3.9.1\nThis process")

    monkeypatch.setattr(ray, "init", other_versions)
    with pytest.raises(KnnlmError, match=r"other versions than this process: .*Ray: 2.1"):
        connection.connect("auto")


def test_ray_is_missing(monkeypatch, dump, tmp_path, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find(name, *rest))
    with pytest.raises(KnnlmError, match="ray is missing; run pip install 'fairseq-knnlm"):
        connection.import_ray()
    tables = ["neighbors", "--datastore", dump("train"), "--queries", dump("valid"), "-o", tmp_path / "table"]
    assert "ray is missing" in error_of(capsys, *tables, "--engine", "ray")
    assert "--ray-address does nothing" in error_of(capsys, *tables, "--ray-address", "local")


# --- searches ahead of the model --------------------------------------------------------------------------------------


class SlowMemory(Memory):
    """Counts the searches that are under way."""

    weight, extractor, part_queries = 0.5, None, 2
    title = facts = None

    def __init__(self):
        self.under_way, self.most, self.finished = 0, 0, []

    def scores_in_parts(self, queries, targets, keep=False):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        yield MemoryScores(targets.float())
        self.under_way -= 1

    def vocabulary_log_probs(self, queries, vocabulary_size):
        raise NotImplementedError


def test_few_searches_at_once_and_in_order():
    memory, received = SlowMemory(), []
    with ahead_of_model.SearchesAhead([memory], False, lambda number, part: received.append(part.log_probs)) as ahead:
        assert ahead.part_queries == 2
        for step in range(10):
            ahead.begin([[torch.zeros(2, 3)]], [torch.tensor([2 * step, 2 * step + 1])])
            assert len(ahead._waiting[0]) <= ahead_of_model.IN_FLIGHT + 1
        ahead.finish()
    assert torch.cat(received).tolist() == list(range(20)) and memory.most <= ahead_of_model.IN_FLIGHT
