"""A Ray cluster of three nodes, as processes of this machine; started once for all tests of a worker."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from stores import make_store

from fairseq_knnlm.index import build_index

NODES = 3
ACTORS = 5


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """``ray``, ``cluster``, ``address`` and ``start_node(**settings)`` of a cluster with three nodes."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'fairseq-knnlm[ray]'")
    from ray.cluster_utils import Cluster

    # Workers import this package from here, wherever pytest was started.
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *os.environ.get("PYTHONPATH", "").split(":")])
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    with mock.patch.dict(os.environ, {"PYTHONPATH": path}):
        nodes = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})

        def start_node(**settings: object) -> object:
            return nodes.add_node(**small, **settings)

        for _ in range(NODES - 1):
            start_node()
        ray.init(address=nodes.address, namespace="knnlm", log_to_driver=False, logging_level="ERROR")
        yield SimpleNamespace(ray=ray, nodes=nodes, address=nodes.address, start_node=start_node)
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(scope="session")
def pool(cluster) -> list:
    """Actors that every test opens anew: to start one is to import torch and FAISS, which takes seconds."""
    from fairseq_knnlm.cluster.list_actor import ListActor

    return [cluster.ray.remote(ListActor).options(num_cpus=0).remote() for _ in range(ACTORS)]


@pytest.fixture
def pooled(pool, monkeypatch) -> None:
    """Engines take the actors of the pool, each once, instead of starting some."""
    from fairseq_knnlm.cluster.remote_visitor import RemoteVisitor

    free = iter(pool)

    def start(self: RemoteVisitor) -> tuple:
        actor = next(free)
        return actor, actor.open.remote(self._task)

    monkeypatch.setattr(RemoteVisitor, "_start", start)


@pytest.fixture(scope="session")
def indexed(lasting_store):
    """indexed(metric, dtype): made-up keys and their index of 40 lists."""

    def make(metric: str = "l2", dtype: str = "float16"):
        store = lasting_store(3000, dtype)
        return store, build_index(store, f"IVF40,{ {'float16': 'SQfp16', 'int8': 'SQ8'}[dtype] }", metric)

    return make


@pytest.fixture
def own_store(tmp_path):
    """A datastore that a test may damage, and its index."""
    store = make_store(tmp_path / "own", 2000)
    return store, build_index(store, "IVF16,SQfp16", "l2")
