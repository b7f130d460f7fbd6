"""Lists spread over actors: the same as one process, for any number of them, and when some are lost."""

import shutil

import numpy as np
import pytest
import torch
from reference import knn_distribution, knn_probability
from stores import keys_of, make_store

from fairseq_knnlm.cluster import remote_visitor
from fairseq_knnlm.cluster.ray_search import make_ray_search
from fairseq_knnlm.cluster.remote_visitor import RemoteVisitor
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.index import build_index, open_index
from fairseq_knnlm.index.list_files import open_lists
from fairseq_knnlm.memory import DatastoreMemory
from fairseq_knnlm.search import ListSearch


def ask(store, count=60) -> tuple[np.ndarray, np.ndarray]:
    """Queries near keys, and targets of which a few are no value of the datastore."""
    rng = np.random.default_rng(2)
    queries = keys_of(store)[rng.integers(0, len(store), count)] + 0.05 * rng.normal(size=(count, store.dim))
    return queries.astype(np.float32), rng.integers(0, 55, count)


def local_engine(store, info, far=0) -> ListSearch:
    return ListSearch(open_index(store, info), store, info.metric, 5, open_lists(store, info), far)


def ray_engine(cluster, store, info, actors, far=0):
    return make_ray_search(store, info, 5, far, cluster.address, "cpu", actors=actors)


def assert_same_mass(ours, theirs, queries, targets) -> None:
    """To the last digit that the order of addition allows."""
    for one, other in zip(*(engine.target_mass(queries, targets, [2.0, 4.0]) for engine in (ours, theirs))):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-9)


@pytest.mark.usefixtures("pooled")
@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize(("actors", "dtype"), [(1, "float16"), (2, "int8"), (3, "float16"), (5, "float16")])
def test_any_number_of_actors_gives_the_same(cluster, indexed, metric, actors, dtype):
    store, info = indexed(metric, dtype)
    one, several = local_engine(store, info, far=6), ray_engine(cluster, store, info, actors, far=6)
    assert len(several.visitors) == actors
    queries, targets = ask(store)
    assert_same_mass(several, one, queries, targets)
    for k in (1, 20, 2000):
        for some in (queries, queries[:3]):
            (distances, ids), (expected, expected_ids) = several.search(some, k), one.search(some, k)
            np.testing.assert_array_equal(ids >= 0, expected_ids >= 0)
            found = ids >= 0
            np.testing.assert_allclose(distances[found], expected[found], rtol=1e-4, atol=1e-3)
            assert (np.sort(ids) == np.sort(expected_ids)).mean() > 0.99  # ties
    for row in (0, 30):
        query = queries[row : row + 1]
        (distances, ids), (expected, expected_ids) = (engine.visited(query) for engine in (several, one))
        order, expected_order = ids[0].argsort(), expected_ids[0].argsort()
        np.testing.assert_array_equal(ids[0, order], expected_ids[0, expected_order])
        np.testing.assert_allclose(distances[0, order], expected[0, expected_order], rtol=1e-5)
        (values, masses), (all_values, all_masses) = (engine.visited_masses(query, 3.0) for engine in (several, one))
        for value in range(55):
            sums = [np.logaddexp.reduce(m[v == value], initial=-np.inf) for v, m in
                    ((values, masses), (all_values, all_masses))]  # fmt: skip
            np.testing.assert_allclose(*sums, rtol=1e-9)


@pytest.mark.usefixtures("pooled")
def test_queries_go_to_actors_that_need_them_only(cluster, indexed):
    store, info = indexed()
    one, several = local_engine(store, info), ray_engine(cluster, store, info, 4)
    queries, targets = ask(store, 40)
    assert_same_mass(several, one, queries, targets)
    lists = one._nearest_lists(queries)[0]
    owners = [np.unique(np.searchsorted([v._task.stop for v in several.visitors], row, side="right")) for row in lists]
    pairs = sum(map(len, owners))
    assert pairs < 4 * len(queries)  # or every actor needs every query, and nothing is tested
    row_bytes = 4 * store.dim + 8 + 4  # query, target, and at least one list
    assert pairs * row_bytes <= several.traffic.sent <= pairs * (row_bytes + 4 * 5) + 1000
    assert several.traffic.received == pairs * (2 * 2 + 1) * 8  # two sums at two temperatures, the largest similarity
    # a query that nobody has lists for
    nothing = [visitor.masses(one_tensor(queries), targets, np.full((40, 5), -1), [1.0], True)
               for visitor in several.visitors]  # fmt: skip
    assert all(np.isneginf(mass.total).all() and not mass.lists.any() for mass in nothing)


def one_tensor(queries):
    import torch

    return torch.from_numpy(queries)


@pytest.mark.usefixtures("pooled")
def test_uneven_lists_and_empty_ranges(cluster, tmp_path):
    """All keys but a few in one list: it cannot be divided, and an actor without lists is not started."""
    from stores import make_store

    from fairseq_knnlm.index import build_index

    store = make_store(tmp_path / "uneven", 2000)
    info = build_index(store, "IVF2,SQfp16", "l2")
    several = ray_engine(cluster, store, info, 5)
    assert 1 <= len(several.visitors) <= 2
    queries, targets = ask(store)
    assert_same_mass(several, local_engine(store, info), queries, targets)


# --- faults -----------------------------------------------------------------------------------------------------------


def kill_after_start(monkeypatch, ray) -> None:
    """The first actor is killed while it opens its lists."""
    start, killed = RemoteVisitor._start, []

    def start_and_kill(self):
        actor, opened = start(self)
        if not killed:
            killed.append(ray.kill(actor))
        return actor, opened

    monkeypatch.setattr(RemoteVisitor, "_start", start_and_kill)


class KilledInAnswer:
    """An actor that is killed as soon as it has been asked."""

    def __init__(self, ray, actor):
        self._ray, self._actor, self.answer = ray, actor, self

    def remote(self, *arguments):
        answer = self._actor.answer.remote(*arguments)
        self._ray.kill(self._actor)
        return answer


def test_an_actor_is_killed_at_each_stage(cluster, indexed, monkeypatch, caplog):
    store, info = indexed()
    one, (queries, targets) = local_engine(store, info), ask(store)
    with monkeypatch.context() as patch:
        kill_after_start(patch, cluster.ray)
        several = ray_engine(cluster, store, info, 2)
    assert caplog.text.count("was lost; another one starts") == 1
    assert_same_mass(several, one, queries, targets)
    cluster.ray.kill(several.visitors[0].actor)  # between two questions
    assert_same_mass(several, one, queries, targets)
    several.visitors[1].actor = KilledInAnswer(cluster.ray, several.visitors[1].actor)
    assert_same_mass(several, one, queries, targets)
    assert caplog.text.count("was lost; another one starts") == 3
    several.close()


def test_a_node_is_lost(cluster, own_store, caplog):
    """Its lists move to another node, on which they are opened anew."""
    store, info = own_store
    node = cluster.start_node(resources={"knnlm": 1})
    several = make_ray_search(store, info, 5, 0, cluster.address, "cpu")
    assert len(several.visitors) == 1  # nodes without the resource have no actor
    before = several.visitors[0].node.id
    cluster.nodes.remove_node(node)
    queries, targets = ask(store)
    assert_same_mass(several, local_engine(store, info), queries, targets)
    assert several.visitors[0].node.id != before and "another one starts" in caplog.text
    several.close()


def test_lists_that_nobody_can_serve_are_an_error(cluster, own_store):
    store, info = own_store
    several = ray_engine(cluster, store, info, 1)
    queries, targets = ask(store)
    shutil.rmtree(store.folder / "index" / info.name)
    cluster.ray.kill(several.visitors[0].actor)
    with pytest.raises(KnnlmError, match=r"lists 0 to 15 cannot be served by .* no whole index"):
        several.target_mass(queries, targets, [1.0])


def test_an_actor_that_is_lost_again_and_again(cluster, own_store, monkeypatch):
    store, info = own_store
    monkeypatch.setattr(remote_visitor, "TRIES", 2)
    several = ray_engine(cluster, store, info, 1)
    queries, targets = ask(store)
    start = RemoteVisitor._start

    def doomed(self):
        actor, opened = start(self)
        cluster.ray.kill(actor)
        return actor, opened

    monkeypatch.setattr(RemoteVisitor, "_start", doomed)
    cluster.ray.kill(several.visitors[0].actor)
    with pytest.raises(KnnlmError, match="2 actors were lost"):
        several.target_mass(queries, targets, [1.0])


def test_a_copy_of_its_own_and_one_that_differs(cluster, own_store, tmp_path):
    """KNNLM_COPIES: a node reads its own copy; one of other keys is refused before anything is searched."""
    store, info = own_store
    copies = tmp_path / "copies"
    shutil.copytree(store.folder, copies / store.folder.name)
    node = cluster.start_node(resources={"knnlm": 1}, env_vars={"KNNLM_COPIES": str(copies)})
    try:
        several = make_ray_search(store, info, 5, 0, cluster.address, "cpu")
        assert several.visitors[0].node.facts["folder"] == str(copies / store.folder.name)
        queries, targets = ask(store)
        assert_same_mass(several, local_engine(store, info), queries, targets)
        several.close()
        manifest = copies / store.folder.name / "manifest.json"
        first = store.shards[0].keys_sha256
        manifest.write_text(manifest.read_text().replace(first, first[::-1]))
        with pytest.raises(KnnlmError, match=r"differs from the one here .*copy it there again"):
            make_ray_search(store, info, 5, 0, cluster.address, "cpu")
        shutil.rmtree(copies)
        with pytest.raises(KnnlmError, match=r"cannot use the datastore: .* is not a datastore"):
            make_ray_search(store, info, 5, 0, cluster.address, "cpu")
    finally:
        cluster.nodes.remove_node(node)


def test_an_index_without_lists(cluster, own_store):
    from fairseq_knnlm.index import build_index

    store, _ = own_store
    with pytest.raises(KnnlmError, match="has none that this release wrote"):
        ray_engine(cluster, store, build_index(store, "flat", "l2"), 1)


@pytest.mark.usefixtures("pooled")
def test_weights_of_entries(cluster, tmp_path):
    """Actors multiply by the weights of their lists, and the driver's far field counts with them."""
    store = make_store(tmp_path / "weighted", 1500, weighted=True)
    info = build_index(store, "IVF16,SQfp16", "l2")
    one, several = local_engine(store, info, far=6), ray_engine(cluster, store, info, 3, far=6)
    queries, targets = ask(store)
    assert_same_mass(several, one, queries, targets)
    everything = make_ray_search(store, info, 16, 0, cluster.address, "cpu", actors=2)
    target, total = everything.target_mass(queries, targets, [5.0])
    arrays = (keys_of(store), store.values, len(store))
    expected = knn_probability(queries, targets, *arrays, 5.0, "l2", store.weights)
    np.testing.assert_allclose(np.exp(target - total)[0], expected, atol=2e-4)
    memory = DatastoreMemory(store, everything, None, 0.25, 5.0, "l2")
    ours = memory.vocabulary_log_probs(torch.from_numpy(queries[:2]), 50).exp()
    expected = knn_distribution(queries[:2], *arrays, 5.0, "l2", 50, store.weights)
    np.testing.assert_allclose(ours, expected, atol=2e-4)
