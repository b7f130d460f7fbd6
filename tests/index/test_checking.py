"""What opening and verifying an index find."""

import faiss
import numpy as np
import pytest
from stores import DIM

from fairseq_knnlm.cli.verification import verify_folder
from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.index import build_index, open_index
from fairseq_knnlm.index.checking import check_index


def test_corrupt_index(store):
    info = build_index(store, "IVF16,PQ8", "l2")
    path = store.folder / "index" / info.name / "index.faiss"
    data = path.read_bytes()
    path.write_bytes(b"x" * len(data))
    with pytest.raises(KnnlmError, match=r"is damaged .*; run knnlm build"):
        open_index(store, info)
    path.write_bytes(data[:-5])
    with pytest.raises(KnnlmError, match="instead of"):
        open_index(store, info)
    path.unlink()
    with pytest.raises(KnnlmError, match="is missing"):
        open_index(store, info)
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    path.write_bytes(flipped)
    assert any("checksum" in check.problem for check in verify_folder(store.folder, everything=True))


def damaged_index(store: Datastore, damage) -> tuple[faiss.Index, object]:
    """An index whose inverted lists were filled by ``damage(lists, ids, keys)``."""
    info = build_index(store, "IVF16,SQfp16", "l2")
    sound = open_index(store, info)
    index = faiss.index_factory(DIM, "IVF16,SQfp16")
    index.by_residual = False
    index.quantizer.add(sound.quantizer.reconstruct_n(0, 16))
    keys = np.concatenate(list(store.key_blocks())).astype(np.float32)
    index.train(keys)
    lists, ids = sound.quantizer.assign(keys, 1)[:, 0].astype(np.int64), np.arange(len(keys))
    lists, ids, keys = damage(lists, ids, keys)
    index.add_core(len(keys), faiss.swig_ptr(keys), faiss.swig_ptr(ids), faiss.swig_ptr(lists))
    return index, info


def other_list(lists, ids, keys):
    lists[::20] = (lists[::20] + 1) % 16
    return lists, ids, keys


def other_id(lists, ids, keys):
    ids[::20] = ids[::20][::-1].copy()
    return lists, ids, keys


def twice(lists, ids, keys):
    ids[5] = 6
    return lists, ids, keys


def other_key(lists, ids, keys):
    keys[7, 3] += 0.01
    return lists, ids, keys


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (other_list, "150 of 3,000 entries are not in the list"),
        (other_id, "of 3,000 entries have codes that are not those of their keys"),
        (twice, "1 of 3,000 entries are in no list"),
        (other_key, "1 of 3,000 entries have codes"),
        (lambda *arrays: arrays, ""),
    ],
)
def test_verify_compares_every_entry(store, damage, problem):
    found = check_index(store, *damaged_index(store, damage), everything=True)
    assert problem in found if problem else found == ""
