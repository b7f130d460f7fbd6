"""Who owns which lists, and what is refused before anything starts; without Ray."""

import platform
from itertools import pairwise

import numpy as np
import pytest

from fairseq_knnlm.cluster.connection import check_address, describe
from fairseq_knnlm.cluster.node_facts import own_facts, parse_processors, sockets
from fairseq_knnlm.cluster.nodes import Node, check_copies, check_software
from fairseq_knnlm.cluster.placement import check_memory, choose_device, seats, share_lists
from fairseq_knnlm.cluster.ray_search import is_elsewhere, part_queries
from fairseq_knnlm.errors import KnnlmError

GB = 10**9


def node(number: int = 0, memory: int = 64 * GB, actors: int | None = None, gpus: int = 0, **facts) -> Node:
    known = {"python": platform.python_version(), "ray": "2.60", **own_facts(), "host": f"n{number}", "memory": memory}
    return Node(str(number), f"10.0.0.{number}", 8, gpus, actors, {**known, "sockets": [list(range(8))], **facts})


def test_ranges_balance_bytes_and_visits():
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 2000, 500)
    visits = rng.random(500)
    places = seats([node(number) for number in range(4)], "cpu")
    ranges = share_lists(sizes, visits / visits.sum(), places, 264)
    assert ranges[0][0] == 0 and ranges[-1][1] == 500 and all(a[1] == b[0] for a, b in pairwise(ranges))
    work = visits * sizes
    for total in (sizes, work):
        parts = [total[first:stop].sum() / total.sum() for first, stop in ranges]
        assert max(parts) < 0.3  # a quarter, and what lists that cannot be divided make of it
    skewed = np.where(np.arange(500) < 100, 10.0, 1.0)
    first, stop = share_lists(sizes, skewed / skewed.sum(), places, 264)[0]
    assert stop - first < 100  # lists that are visited often are fewer in a range


def test_small_nodes_get_fewer_lists():
    sizes = np.full(100, 1000)
    places = seats([node(0, memory=100_000), node(1, memory=400_000)], "cpu")
    (_, cut), _ = share_lists(sizes, np.full(100, 0.01), places, 5)  # 500 kB in all
    assert cut == 20


def test_seats():
    plain = seats([node(0), node(1)], "cpu")
    assert [place.node.id for place in plain] == ["0", "1"] and plain[0].processors is None and plain[0].threads == 8
    two_sockets = seats([node(0, sockets=[[0, 1, 2, 3], [4, 5, 6, 7]])], "cpu")
    assert [place.processors for place in two_sockets] == [[0, 1, 2, 3], [4, 5, 6, 7]] and two_sockets[0].threads == 4
    chosen = seats([node(0), node(1, actors=2)], "cpu")
    assert [place.node.id for place in chosen] == ["1", "1"] and chosen[0].threads == 4
    assert [place.gpu for place in seats([node(0, gpus=2), node(1, gpus=1)], "cuda")] == [True] * 3
    assert len(seats([node(0), node(1), node(2)], "cpu", 5)) == 5
    with pytest.raises(KnnlmError, match="no node of the Ray cluster has a GPU"):
        seats([node(0)], "cuda")


def test_devices():
    with_gpus = [node(0, gpus=2, gpu_memory=[40 * GB, 40 * GB]), node(1, gpus=1, gpu_memory=[40 * GB])]
    assert choose_device("auto", with_gpus, 60 * GB) == "cuda"
    assert choose_device("auto", with_gpus, 100 * GB) == "cpu" and choose_device("auto", [node()], 1) == "cpu"
    with pytest.raises(KnnlmError, match="use --knn-device cuda, cpu or auto, not 'cuda:0,cuda:1'"):
        choose_device("cuda:0,cuda:1", with_gpus, 1)


def test_too_little_memory_is_said_with_numbers():
    nodes = [node(0, memory=60 * GB), node(1, memory=30 * GB)]
    check_memory(nodes, 90 * GB, "wiki")
    with pytest.raises(KnnlmError, match=r"take 91\.0 GB, but the 2 nodes have 90\.0 GB of memory in all"):
        check_memory(nodes, 91 * GB, "wiki")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"python": "3.9.1"}, "has Python 3.9.1, but here it is"),
        ({"ray": "2.1"}, "has Ray 2.1, but here it is 2.60"),
        ({"package": "0.0.1"}, "has fairseq-knnlm 0.0.1"),
        ({"source": "x"}, "its source differs"),
        ({"package": None, "missing": "No module named 'fairseq_knnlm'"}, "cannot import fairseq_knnlm"),
    ],
)
def test_other_software(facts, expected):
    check_software([node()], "2.60")
    with pytest.raises(KnnlmError, match=expected):
        check_software([node(), node(1, **facts)], "2.60")


def test_other_copies():
    same = {"folder": "/data", "keys": "abc", "index": {"name": "auto"}}
    check_copies([node(0, **same)], "abc", {"name": "auto"})
    with pytest.raises(KnnlmError, match="checksums of its keys"):
        check_copies([node(0, **{**same, "keys": "x"})], "abc", {"name": "auto"})
    with pytest.raises(KnnlmError, match="checksums of its index"):
        check_copies([node(0, **{**same, "index": {"name": "other"}})], "abc", {"name": "auto"})
    with pytest.raises(KnnlmError, match="cannot use the datastore: not there; put it on a shared file system"):
        check_copies([node(0, problem="not there")], "abc", None)


@pytest.mark.parametrize("address", ["", "somewhere", "ray://host:10001", "host:", ":6379"])
def test_addresses(address):
    for good in ("auto", "local", "10.0.0.1:6379"):
        check_address(good)
    with pytest.raises(KnnlmError, match="--knn-ray-address takes auto"):
        check_address(address)


def test_queries_of_a_part():
    assert part_queries(16_384, 32, 1 << 20) == 65_536  # 128 visits of each list
    assert part_queries(262_144, 32, 262_144) == 65_536 and part_queries(4, 4, 3) == 1  # at least four parts


def test_the_model_works_ahead_of_other_nodes_only():
    assert not is_elsewhere(seats([node(1, actors=3)], "cpu"), "1")
    assert is_elsewhere(seats([node(1), node(2)], "cpu"), "1") and is_elsewhere(seats([node(2)], "cpu"), "1")


def test_processors():
    assert parse_processors("0-2,8\n") == {0, 1, 2, 8} and parse_processors("") == set()
    assert sum(map(len, sockets())) >= 1


def test_other_versions_in_rays_own_words():
    text = "Version mismatch: The cluster was started with:\n    Ray: 2.1\n    Python: 3.9\nThis process has Ray 2.60."
    assert "install the same Python and Ray on every node" in describe(RuntimeError(text))
    assert "\n" not in describe(RuntimeError(text))
