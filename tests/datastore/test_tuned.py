"""What knnlm tune --keep stores in a datastore's folder."""

import json
from dataclasses import replace

import pytest

from fairseq_knnlm.datastore.checks import verify_datastore
from fairseq_knnlm.datastore.tuned import TUNED, TunedValues, keep_tuned, read_tuned
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.storage import remove_stale_files

VALUES = TunedValues(
    keys="a", weight=0.31, temperature=9.2, k=None, metric="l2", score="exact", beside=[], search={"nprobe": 32},
    split="valid", tokens=1000, perplexity=90.5, settings=9, when="2026-01-02T03:04:05+00:00",
)  # fmt: skip


def test_round_trip(tmp_path):
    assert read_tuned(tmp_path, "a") == []
    assert keep_tuned(tmp_path, VALUES) == tmp_path / TUNED
    assert read_tuned(tmp_path, "a") == [VALUES]
    assert VALUES.origin == "tuned on valid (2026-01-02)"
    assert read_tuned(tmp_path, "other keys") == []


def test_newer_values_replace_those_of_the_same_mixture_only(tmp_path):
    others = [
        replace(VALUES, beside=["b"]), replace(VALUES, cache_size=100, cache_weight=0.1, theta=0.2),
        replace(VALUES, metric="ip"), replace(VALUES, score="index", k=64),
    ]  # fmt: skip
    for values in (VALUES, *others, replace(VALUES, weight=0.5, when="2026-02-03T00:00:00+00:00")):
        keep_tuned(tmp_path, values)
    assert read_tuned(tmp_path, "a") == [*others, replace(VALUES, weight=0.5, when="2026-02-03T00:00:00+00:00")]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:50], "is damaged"),
        (lambda text: text.replace('"temperature": 9.2', '"temperature": "hot"'), "the field temperature"),
        (lambda text: text.replace('"weight": 0.31', '"weight": 31'), "is damaged (lambda 31"),
        (lambda text: text.replace('"version": 1', '"version": 7'), "not of a kind"),
        (lambda text: '{"format": "fairseq-knnlm tuned values", "version": 1}', "lists no values"),
        (lambda text: "[]", "no fields"),
    ],
)
def test_damaged_records_give_one_sentence(tmp_path, damage, message):
    path = keep_tuned(tmp_path, VALUES)
    path.write_text(damage(path.read_text()))
    with pytest.raises(KnnlmError, match=r"delete .*tuned\.json") as error:
        read_tuned(tmp_path, "a")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_verify_notices_a_changed_digit(store):
    path = keep_tuned(store.folder, VALUES)
    assert not any(check.problem for check in verify_datastore(store))
    path.write_text(path.read_text().replace("9.2", "9.3"))
    assert [check.what for check in verify_datastore(store) if check.problem] == [TUNED]


def test_the_lock_of_a_killed_process_is_removed(tmp_path):
    (tmp_path / "tuned.json.lock").touch()
    remove_stale_files(tmp_path)
    assert not list(tmp_path.iterdir())
    keep_tuned(tmp_path, VALUES)
    assert json.loads((tmp_path / TUNED).read_text())["checksum"]
    assert [path.name for path in tmp_path.iterdir()] == [TUNED]
