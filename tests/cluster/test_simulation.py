"""The simulation of more nodes, and the page that is written from its numbers."""

import json

import numpy as np
import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install 'fairseq-knnlm[ray]'")

from benchmarks import cluster_page
from benchmarks.cluster import fit
from benchmarks.cluster_simulation import Costs, Visits, simulate_search, simulate_sizes

COSTS = {
    "threads": 2, "dim": 64, "row_bytes": 136, "list_seconds": 1e-4, "entry_seconds": 1e-8, "pair_seconds": 1e-9,
    "coarse_seconds": 1e-6, "join_seconds": 1e-8, "latency_seconds": 1e-3, "bytes_per_second": 1e9,
}  # fmt: skip


@pytest.fixture
def visits() -> Visits:
    rng = np.random.default_rng(0)
    near = rng.integers(-1, 50, (300, 4))
    return Visits(near, rng.integers(0, 900, 50))


def test_features_by_hand():
    few = Visits(np.array([[0, 2], [2, -1], [1, 0]]), np.array([10, 0, 5, 7]))
    assert few.features() == (2, 15, 2 * 10 + 0 + 2 * 5)  # list 1 is empty, nobody visits list 3
    assert few.features(2, 4) == (1, 5, 10) and few.rows(0, 2) == (2, 2) and few.rows(3, 4) == (0, 0)


def test_nodes_share_the_work(visits):
    costs = Costs.of(COSTS)
    alone, spread = simulate_search(visits, costs, 1), simulate_search(visits, costs, 8)
    assert alone.mean_node == pytest.approx(8 * spread.mean_node) and spread.slowest_node < alone.slowest_node / 4
    assert spread.sent > alone.sent  # a query goes to several nodes
    crowded = simulate_search(visits, costs, 8, shared_cores=2)
    assert crowded.seconds > spread.seconds  # all on one machine gain nothing


def test_sizes(visits):
    rows = simulate_sizes(visits, Costs.of(COSTS))
    assert {row["entries"] for row in rows} == {103_227_021, 1_000_000_000, 3_000_000_000}
    assert all(row["memory_per_node"] <= 0.8 * 64e9 and row["tokens_per_second"] > 0 for row in rows)


def test_costs_are_found_again():
    rng = np.random.default_rng(1)
    rows = rng.integers(1, 1000, (6, 3)) * np.array([1, 1e3, 1e6])
    np.testing.assert_allclose(fit(rows, rows @ [2e-4, 3e-8, 1e-9]), [2e-4, 3e-8, 1e-9], rtol=1e-6)


def test_the_page(visits, tmp_path):
    costs = Costs.of(COSTS)
    growth = [{"nodes": nodes, **simulate_search(visits, costs, nodes).facts()} for nodes in (1, 64)]
    check = {"actors": 1, "measured": 2.0, "simulated": 2.2, "bytes_measured": 100, "bytes_simulated": 110}
    results = {
        "about": {"entries": 1000, "keys": "64 x int8", "tokens": 300, "threads": 2, "ray": "2.60"},
        "costs": {**COSTS, "nprobe": 4},
        "simulation": {
            "checks": [check], "growth": growth, "network_bytes_per_second": 1.25e9,
            "sizes": simulate_sizes(visits, costs),
        },
    }  # fmt: skip
    file, guide = tmp_path / "cluster.json", tmp_path / "guide.md"
    file.write_text(json.dumps(results))
    guide.write_text(f"# Guide\n{cluster_page.BEGIN}\nold\n{cluster_page.END}\nrest\n")
    cluster_page.write_page(file, guide)
    assert "+10%" in file.with_suffix(".md").read_text() and "3,000 million" in guide.read_text()
    assert "old" not in guide.read_text() and guide.read_text().endswith("rest\n")


def test_the_guide_has_a_place_for_the_table():
    text = cluster_page.GUIDE.read_text()
    assert text.count(cluster_page.BEGIN) == 1 and text.count(cluster_page.END) == 1
