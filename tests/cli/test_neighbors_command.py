"""knnlm neighbors: tables against brute force, in parts, refused."""

import numpy as np
import pytest
from commands import knnlm, make_table
from reference import load

from fairseq_knnlm.data.neighbor_table import NeighborTable
from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.errors import KnnlmError


def test_table_against_brute_force(dump, neighbors, tokens):
    store = Datastore(dump("train"))
    keys, values = load(store)
    keys = keys.astype(np.float64)
    for split, window in (("train", 64), ("valid", -1)):
        table, queries = NeighborTable(neighbors / split), load(Datastore(dump(split)))
        assert len(table) == tokens[split]
        for row in range(0, len(table), 97):
            distances = ((keys - queries[0][row].astype(np.float64)) ** 2).sum(axis=1)
            distances[np.abs(np.arange(len(keys)) - row) <= window] = np.inf  # --tokens-per-sample was 64
            np.testing.assert_allclose(table.distances(row, row + 1)[0], np.sort(distances)[:4], rtol=1e-3, atol=1e-3)
            ids = table.ids(row, row + 1)[0]
            np.testing.assert_array_equal(table.tokens(row, row + 1)[0], values[ids])
        np.testing.assert_array_equal(table.own_tokens(0, len(table)), queries[1])
    first = NeighborTable(neighbors / "valid")
    share = (first.tokens(0, len(first))[:, 0].numpy() == first.own_tokens(0, len(first))).mean()
    assert first.shares_of_target()[0] == pytest.approx(share)


def test_no_token_finds_itself_in_a_subsample(dump, tmp_path):
    assert knnlm("subsample", dump("train"), "--fraction", "0.5", "-o", tmp_path / "half") == 0
    assert make_table(tmp_path / "half", dump("train"), tmp_path / "table", "--window", "10") == 0
    table, places = NeighborTable(tmp_path / "table"), np.load(tmp_path / "half/positions.npy")
    distance = np.abs(places[table.ids(0, len(table))] - np.arange(len(table))[:, None])
    assert distance.min() == 11


def test_parts_and_resuming(dump, neighbors, capsys, tmp_path):
    """Parts give the same table; what was interrupted is continued, and nothing is made twice."""
    outputs = []
    for part in (1, 0):
        make_table(dump("train"), dump("valid"), tmp_path / "table", "--num-shards", 2, "--shard-id", part)
        outputs.append(capsys.readouterr().out)
    whole, parts = NeighborTable(neighbors / "valid"), NeighborTable(tmp_path / "table")
    np.testing.assert_array_equal(parts.ids(0, len(parts)), whole.ids(0, len(whole)))
    assert "the first neighbour" not in outputs[0] and "the first neighbour" in outputs[1]
    files = sorted((tmp_path / "table").glob("ids-*.npy"))
    files[3].unlink()
    with pytest.raises(KnnlmError, match=r"incomplete \(1 of"):
        NeighborTable(tmp_path / "table")
    before = {file: file.stat().st_mtime_ns for file in files if file.exists()}
    make_table(dump("train"), dump("valid"), tmp_path / "table")
    output = capsys.readouterr().out
    assert f"{len(np.load(files[3])):,} tokens in" in output and "processor seconds for a million" in output
    assert before == {file: file.stat().st_mtime_ns for file in before}
    np.testing.assert_array_equal(NeighborTable(tmp_path / "table").ids(0, len(whole)), whole.ids(0, len(whole)))


def test_bad_tables(corpus, dump, neighbors, xl_store, capsys, tmp_path):
    def sentence(queries, *flags, folder=tmp_path / "table") -> str:
        assert make_table(dump("train"), queries, folder, *flags) == 1
        return capsys.readouterr().err

    assert "another checkpoint" in sentence(xl_store["valid"])
    assert "--k must be" in sentence(dump("valid"), "--k", "0")
    assert "--nprobe must be" in sentence(dump("valid"), "--nprobe", "0")
    assert "leave it out" in sentence(dump("valid"), "--window", "3")
    assert not (tmp_path / "table").exists()
    assert "holds other neighbours" in sentence(dump("valid"), "--k", "3", folder=neighbors / "valid")
