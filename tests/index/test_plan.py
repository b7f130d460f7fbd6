"""Index specs, presets, and the space that they need."""

import pytest
from stores import DIM

from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.index import build_index, plan_index
from fairseq_knnlm.index.checking import verify_index


def test_auto_depends_on_the_size():
    """Lists hold the keys themselves at every size, since they are read in order where memory is small."""

    def factory(entries, dtype="float16", dim=256):
        return plan_index("auto", entries, dim, dtype, "l2").factory

    assert factory(1000) is None
    assert factory(1_000_000) == "IVF2048,SQfp16"
    assert factory(10_000_000) == "IVF16384(IVF128,Flat),SQfp16"
    assert factory(10_000_000, "float32") == "IVF16384(IVF128,Flat),Flat"
    assert factory(103_000_000, "int8", dim=128) == "IVF131072(IVF256,Flat),SQ8"
    assert factory(3_000_000_000, dim=1024) == "IVF262144(IVF512,Flat),SQfp16"


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


@pytest.mark.parametrize("spec", ["IVF16,PQ8x4fs", "PCA32,IVF16,PQ8", "HNSW8"])
def test_disk_for_a_second_index(spec):
    found = plan_index(spec, 100_000, DIM, "float16", "l2")
    assert found.disk_bytes == 2 * found.bytes


def test_memory_is_bounded_where_lists_are_written_one_after_the_other():
    large = plan_index("auto", 103_000_000, 1024, "float16", "l2")
    assert large.bytes > 200e9 and large.memory_bytes == 2 << 30
    assert plan_index("IVF4096,PQ32x4fs", 103_000_000, 1024, "float16", "l2").memory_bytes > 2 << 30


def test_disk_for_the_partition_file():
    """Besides the index: the list of every key, its code, id, list and value, and what stands beside the lists."""
    found = plan_index("IVF16,SQfp16", 100_000, DIM, "float16", "l2")
    assert found.disk_bytes == found.bytes + 100_000 * (4 + 2 * DIM + 8 + 4 + 4 + 4)


def test_groups_shrink_with_the_lists():
    plan = plan_index("IVF16384(IVF128,Flat),SQfp16", 3000, 16, "float16", "l2")
    assert plan.factory == "IVF64(IVF8,Flat),SQfp16"


def test_codes_in_two_steps_are_added_by_faiss(store):
    info = build_index(store, "IVF16,PQ4+4", "l2")
    assert verify_index(store, info, everything=True) == "" and not info.files
