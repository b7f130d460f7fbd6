"""How much of a datastore takes part: presets, flags, limits."""

from dataclasses import replace

import pytest
from knn_flags import flags, index

from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.index.list_files import LIST_SPREADS
from fairseq_knnlm.memory.extent import limit_k, limit_nprobe, lists_of_far_field, lists_to_visit
from fairseq_knnlm.memory.presets import flag


def test_a_preset_speaks_where_flags_are_silent():
    paper = flags(preset="paper", temperature="5")
    found = {name: flag(paper, f"knn_{name}") for name in ("index", "k", "lambda", "temperature")}
    assert found == {"index": "paper", "k": "1024", "lambda": "0.25", "temperature": "5"}
    assert flag(flags(), "knn_k") is None and flag(flags(k="8"), "knn_k") == "8"
    with pytest.raises(KnnlmError, match="--knn-preset takes fast or paper, not 'papers'"):
        flag(flags(preset="papers"), "knn_k")


@pytest.mark.parametrize(
    "given, lists, far",
    [({}, 32, 64), ({"preset": "paper"}, 32, 64), ({"preset": "fast"}, 16, 64), ({"nprobe": 32}, 32, 0),
     ({"preset": "fast", "nprobe": 32}, 32, 64), ({"preset": "fast", "far": 0}, 16, 0), ({"far": 0}, 32, 0),
     ({"preset": "fast", "metric": "ip"}, 16, 0), ({"nprobe": 5, "far": 7}, 5, 7),
     ({"metric": "ip"}, 32, 0), ({"metric": "ip", "far": 3}, 32, 3)],
)  # fmt: skip
def test_lists_by_preset_and_flags(given, lists, far):
    info = replace(index("IVF128,SQfp16"), files={LIST_SPREADS: "checksum"})
    args = flags(**given)
    assert (lists_to_visit(args), lists_of_far_field(args, None, info)) == (lists, far)


def test_no_far_field_where_nobody_asked_and_it_cannot_be():
    spreads = replace(index("IVF128,SQfp16"), files={LIST_SPREADS: "checksum"})
    cases = ((1024, spreads), (None, index("IVF128,PQ8")), (None, None))
    assert [lists_of_far_field(flags(), k, info) for k, info in cases] == [0, 0, 0]
    with pytest.raises(KnnlmError, match="--knn-far goes with --knn-k all"):
        lists_of_far_field(flags(far=8), 1024, spreads)
    with pytest.raises(KnnlmError, match="--knn-far must be 0 or more, not -1"):
        lists_of_far_field(flags(far=-1), None, spreads)


def test_a_preset_gives_way(caplog):
    """fast asks for a far field only where there can be one; a flag that nothing can come of says so."""
    spreads = replace(index("IVF128,SQfp16"), files={LIST_SPREADS: "checksum"})
    fast = flags(preset="fast", k="1024")
    assert lists_of_far_field(fast, 1024, spreads) == 0
    assert lists_of_far_field(flags(preset="fast"), None, index("IVF128,PQ8")) == 0
    caplog.set_level("INFO")
    assert lists_of_far_field(flags(far=8), None, index(None)) == 0 and "does nothing without inverted" in caplog.text


def test_k_and_nprobe_above_what_there_is(caplog):
    caplog.set_level("INFO")
    assert limit_k(10, [10, 5], True) == 10 and limit_k(None, [5], True) is None and not caplog.messages
    assert limit_k(99999999, [413002], can_be_all=True) is None
    assert caplog.messages == [
        "--knn-k 99999999 is above the 413,002 entries, so every visited entry takes part, as with --knn-k all"
    ]
    assert limit_k(99999999, [413002], can_be_all=False) == 413002
    caplog.clear()
    assert limit_nprobe(16, index("IVF16,PQ8")) == 16 and limit_nprobe(64, None) == 64 == limit_nprobe(64, index(None))
    assert limit_nprobe(32, index("IVF16,PQ8")) == 16 and not caplog.messages  # the default, which nobody asked for
    assert limit_nprobe(100, index("IVF64(IVF8,Flat),SQfp16")) == 64
    assert caplog.messages == ["--knn-nprobe 100 is above the 64 lists of the index, so all of them are visited"]
