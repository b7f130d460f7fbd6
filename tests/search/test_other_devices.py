"""The search on another device than the CPU, without one: fake tensors have a device and a shape and no numbers.

They raise wherever two devices meet in one operation, which is the usual mistake. The device is called "meta", because
a torch without CUDA cannot index fake tensors on "cuda".
"""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fairseq_knnlm import machine
from fairseq_knnlm.datastore.key_codec import KeyCodec, KeyForm, learn_codec
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.index import IndexInfo, kmeans
from fairseq_knnlm.index.kmeans import best_centroids, nearest_centroids
from fairseq_knnlm.memory import devices
from fairseq_knnlm.search.distances import block_distances
from fairseq_knnlm.search.list_blocks import KeyDecoder
from fairseq_knnlm.search.target_mass import TargetMass, TargetRuns, log_masses, runs
from fairseq_knnlm.search.top_k import Thresholds

OTHER = torch.device("meta")


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("factors", [[1.0], [0.5, 1.0, 2.0]])
def test_distances_and_sums(metric, factors):
    found = TargetRuns(*runs(np.array([1, 1, 2, 5, 5, 5])), np.array([5, 3, 1]))
    with FakeTensorMode(allow_non_fake_inputs=True):
        queries, keys = torch.empty((3, 8), device=OTHER), torch.empty((6, 8), device=OTHER)
        similarities, constants = block_distances(queries, keys, metric, -0.5)
        masses = log_masses(similarities, constants, found, factors)
    assert masses.device.type == "meta" and masses.shape == (2, len(factors), 3) and masses.dtype == torch.double


def test_accumulating_over_lists():
    values = runs(np.array([1, 1, 2]))
    with FakeTensorMode(allow_non_fake_inputs=True):
        mass = TargetMass(np.array([1, 2, 3, 4]), [1.0, 2.0], OTHER, keep_mean=True)
        rows = torch.tensor([0, 2])
        mass_rows = _RealRows(rows)
        mass.add(mass_rows, torch.empty((2, 3), device=OTHER), torch.empty(2, device=OTHER), *values)
        assert mass._sums.device.type == "meta"


class _RealRows:
    """Rows of queries are integers on the CPU, which a fake tensor does not have."""

    def __init__(self, rows):
        self._rows = rows

    def numpy(self):
        return np.array([0, 2])

    def to(self, device):
        return self._rows.to(device)


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_decoding_keys(dtype):
    sample = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
    codec = learn_codec(sample, KeyForm(8, 8, dtype))[0] if dtype == "int8" else KeyCodec(dtype)
    stored = np.zeros((5, 8), np.uint8 if dtype == "int8" else dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        decoder = KeyDecoder(codec, OTHER)
        decoder._pins = False  # pinned memory needs a driver
        for origin in (None, torch.empty(8, device=OTHER)):
            keys = decoder.decode(torch.from_numpy(stored), origin)
            assert keys.device.type == "meta" and keys.dtype == torch.float32


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_finding_lists_and_clustering(metric):
    with FakeTensorMode(allow_non_fake_inputs=True):
        vectors, centroids = torch.empty((10, 8), device=OTHER), torch.empty((6, 8), device=OTHER)
        numbers, scores = best_centroids(vectors, centroids, metric, 3)
        assert numbers.device.type == scores.device.type == "meta" and numbers.shape == (10, 3)
        assert nearest_centroids(vectors, centroids, metric).device.type == "meta"


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_half_precision_and_lists_that_stay_on_the_device(metric):
    """Keys that are on the device already are not copied, and products of half precision end in single precision."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        decoder = KeyDecoder(KeyCodec("float16"), OTHER)
        keys = decoder.decode(torch.empty((6, 8), dtype=torch.float16, device=OTHER), torch.empty(8, device=OTHER))
        found, constants = block_distances(torch.empty((3, 8), device=OTHER), keys, metric, -0.5, torch.float16)
    assert found.device.type == constants.device.type == "meta" and found.dtype == torch.float32


def test_clustering_on_another_device(monkeypatch):
    """One round of k-means; fake numbers cannot say which clusters are empty."""
    monkeypatch.setattr(kmeans, "_refill_empty", lambda *arguments: None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        vectors = torch.empty((50, 8), device=OTHER)
        centroids = kmeans._kmeans(vectors, 4, "l2", torch.Generator().manual_seed(1), range(1))
    assert centroids.device.type == "meta" and centroids.shape == (4, 8)


def test_thresholds_of_neighbours():
    with FakeTensorMode(allow_non_fake_inputs=True):
        thresholds = Thresholds(4, 20, 8, OTHER)
        thresholds.add(torch.tensor([0, 3]), torch.empty((2, 5), device=OTHER), torch.empty(2, device=OTHER))
        assert thresholds.result().device.type == "meta"


def test_two_devices_in_one_operation_are_noticed():
    """What the tests above rely on."""
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError):
        block_distances(torch.empty((3, 8), device=OTHER), torch.empty((6, 8)), "l2")


@pytest.mark.parametrize("count", [1, 3])
def test_sums_gathered_as_on_a_gpu(count):
    """The path of other devices, on the CPU, gives the numbers of the CPU's own."""
    rng = np.random.default_rng(count)
    values, targets = np.sort(rng.integers(0, 6, 40)), rng.integers(0, 8, 9)
    found, block = TargetRuns(*runs(values), targets), torch.from_numpy(rng.random((9, 40)).astype(np.float32))
    gathered = found._gathered_sums(block, torch.zeros(9, dtype=torch.double))
    expected = (block.numpy() * (values == targets[:, None])).sum(axis=1)
    np.testing.assert_allclose(gathered, expected, rtol=1e-5)
    np.testing.assert_allclose(found.sums(block), expected, rtol=1e-5)


# --- which device ---------------------------------------------------------------------------------------------------


def info(size: int) -> IndexInfo:
    return IndexInfo("auto", "auto", "IVF16,SQ8", "l2", 1000, 64, "", bytes=size)


def test_auto_is_the_models_gpu_if_the_lists_fit(monkeypatch):
    monkeypatch.setattr(devices, "gpu_memory", lambda device: 1000)
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert devices.choose_devices("auto", gpu, info(600)) == [gpu]
    assert devices.choose_devices("auto", gpu, info(601)) == [cpu]
    assert devices.choose_devices("auto", gpu, None) == [cpu]
    assert devices.choose_devices("auto", cpu, info(1)) == [cpu]
    assert devices.choose_devices("cpu", gpu, info(1)) == [cpu]


def test_lists_stay_on_gpus_that_hold_them_together(monkeypatch):
    monkeypatch.setattr(devices, "gpu_memory", lambda device: 1000 if device.index == 0 else 500)
    assert devices.lists_stay_on(["cuda:0"], info(600)) and not devices.lists_stay_on(["cuda:0"], info(601))
    assert devices.lists_stay_on(["cuda:0", "cuda:1"], info(600))  # 300 each, which is what the smaller one can hold
    assert not devices.lists_stay_on(["cuda:0", "cuda:1"], info(601))
    assert not devices.lists_stay_on(["cpu"], info(1))


def test_half_precision_is_for_models_that_have_it_on_gpus():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert devices.search_precision(torch.float16, [gpu]) == torch.float16
    assert devices.search_precision(torch.float16, [cpu]) == torch.float32
    assert devices.search_precision(torch.float32, [gpu]) == torch.float32


def test_devices_that_are_asked_for(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(KnnlmError, match="--knn-device cuda is not there: this machine has no GPU"):
        devices.choose_devices("cuda", cpu, info(1))
    with pytest.raises(KnnlmError, match="--device cuda:1 is not there"):
        machine.building_device("cuda:1", flag="--device")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.choose_devices("cuda:1", cpu, info(1)) == [torch.device("cuda:1")]
    assert devices.choose_devices("cuda:0,cuda:1", cpu, info(1)) == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert devices.choose_devices("cuda:1", cpu, None) == [cpu]  # exact search has no other device
    with pytest.raises(KnnlmError, match="cuda:2 is not there: this machine has 2 GPUs"):
        devices.choose_devices("cuda:2", cpu, info(1))
    for wrong in ("gpu", "mps", "cuda:x"):
        with pytest.raises(KnnlmError, match="takes auto, cpu, cuda or cuda:N"):
            devices.choose_devices(wrong, cpu, info(1))
    for wrong in ("cuda:0,cuda:0", "cpu,cuda:1"):
        with pytest.raises(KnnlmError, match="takes several GPUs once each"):
            devices.choose_devices(wrong, cpu, info(1))


def test_where_an_index_is_built(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu = torch.device("cuda:1")
    assert machine.building_device("auto", gpu) == gpu and machine.building_device("auto").type == "cpu"
    assert machine.building_device("cuda:1,cuda:0", torch.device("cpu")) == gpu
