"""Index specs, presets, and the space that they need."""

import pytest
from stores import DIM

from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.index import plan, plan_index


def test_auto_depends_on_size_and_memory(monkeypatch):
    def factory(entries, dtype="float16", dim=256):
        return plan_index("auto", entries, dim, dtype, "l2").factory

    monkeypatch.setattr(plan, "available_memory", lambda: 20 << 30)
    assert factory(1000) is None
    assert factory(1_000_000) == "IVF2048,SQfp16"
    assert factory(10_000_000) == "IVF16384(IVF128,Flat),SQfp16"
    assert factory(10_000_000, "float32") == "IVF16384(IVF128,Flat),Flat"
    assert factory(103_000_000, dim=1024) == "IVF131072(IVF256,Flat),PQ128x4fs"
    assert factory(3_000_000_000, dim=1024) == "IVF262144(IVF512,Flat),PQ128x4fs"


def test_too_few_entries_for_the_papers_clusters():
    paper = plan_index("paper", 1000, 256, "float16", "l2")
    assert paper.factory == "IVF16,PQ64" and "too few" in paper.why


def test_paper_is_the_papers():
    paper = plan_index("paper", 103_000_000, 1024, "float16", "l2")
    assert (paper.factory, paper.train_size) == ("IVF4096,PQ64", 1_000_000)


@pytest.mark.parametrize("spec", ["bestest", "IVF16,PQ7", "IVF16,PQ64x4fsx"])
def test_unknown_spec(spec):
    with pytest.raises(KnnlmError, match=r"neither a preset .auto, paper, flat. nor a FAISS factory string"):
        plan_index(spec, 100_000, 256, "float16", "l2")


def test_too_few_entries_for_codes():
    with pytest.raises(KnnlmError, match="use --knn-index flat"):
        plan_index("IVF4,PQ8", 100, 256, "float16", "l2")


@pytest.mark.parametrize(("spec", "times"), [("IVF16,PQ8x4fs", 2.0), ("PCA32,IVF16,PQ8", 2.0), ("HNSW8", 2.0)])
def test_disk_for_what_a_build_resumes_from(spec, times):
    found = plan_index(spec, 100_000, DIM, "float16", "l2")
    assert found.disk_bytes == times * found.bytes
    by_list = plan_index("IVF16,SQfp16", 100_000, DIM, "float16", "l2")
    assert by_list.disk_bytes == by_list.bytes + 4 * 100_000
