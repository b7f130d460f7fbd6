"""Both libraries for matrix products say the same, and linear layers use the fast one only where they may."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fairseq_knnlm import machine, products
from fairseq_knnlm.parallel import Unlocked
from fairseq_knnlm.products import fast_linear_layers, product_by_one_dnn, product_by_torch
from fairseq_knnlm.search.target_mass import TargetRuns, runs

needs_one_dnn = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this torch has no oneDNN",
)
SHAPES = [(1, 5), (31, 7), (32, 1), (33, 64), (127, 65), (200, 333), (1025, 1100)]  # vectors and rows


@needs_one_dnn
@pytest.mark.parametrize("vectors, rows", SHAPES)
@pytest.mark.parametrize("biased", [True, False])
def test_both_libraries_say_what_numpy_says(vectors, rows, biased):
    rng = np.random.default_rng(vectors)
    left, right = rng.normal(size=(vectors, 24)), rng.normal(size=(rows, 24))
    bias = rng.normal(size=rows) if biased else np.zeros(rows)
    floats = [torch.from_numpy(each.astype(np.float32)) for each in (left, right, bias)]
    for product in (product_by_torch, product_by_one_dnn, Unlocked(product_by_one_dnn)):
        found = product(floats[0], floats[1], floats[2] if biased else None)
        assert found.shape == (vectors, rows) and (found.stride(1) == 1 or rows == 1)
        np.testing.assert_allclose(found.numpy(), left @ right.T + bias, rtol=1e-4, atol=1e-4)


@needs_one_dnn
def test_other_numbers_are_left_to_torch():
    left, right = torch.randn(40, 8).double(), torch.randn(50, 8).double()
    assert torch.equal(product_by_one_dnn(left, right), left @ right.T)
    assert product_by_one_dnn(left.bfloat16(), right.bfloat16()).dtype == torch.bfloat16
    transposed = torch.randn(8, 50)
    torch.testing.assert_close(product_by_one_dnn(left.float(), transposed.T), left.float() @ transposed)


def test_sums_of_runs_where_rows_have_gaps():
    rng = np.random.default_rng(0)
    values, targets = np.sort(rng.integers(0, 9, 40)), rng.integers(0, 11, 7)
    wide = torch.from_numpy(rng.random((7, 64)).astype(np.float32))
    wide[:, 40:] = torch.nan  # what stands there counts for nothing
    found = TargetRuns(*runs(values), targets)
    expected = (wide[:, :40].double().numpy() * (values == targets[:, None])).sum(axis=1)
    np.testing.assert_allclose(found.sums(wide[:, :40]).numpy(), expected, rtol=1e-6)
    assert torch.equal(found.sums(wide[:, :40]), found.sums(wide[:, :40].contiguous()))


@pytest.fixture
def slow_mkl(monkeypatch):
    """As on a processor where linear layers are given to oneDNN."""
    monkeypatch.setattr(products, "MKL_IS_SLOW", True)


class Network(nn.Module):
    """Linear layers of the kinds that there are in language models."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)
        self.layers = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 3, bias=False))

    def forward(self, states):
        return self.layers(self.attention(states, states, states, need_weights=False)[0])


@needs_one_dnn
def test_linear_layers_of_all_kinds_use_it(slow_mkl, monkeypatch):
    torch.manual_seed(1)
    network, states = Network().train(), torch.randn(20, 3, 16)
    calls = []
    one_dnn = products._one_dnn
    monkeypatch.setattr(products, "_one_dnn", lambda *inputs: calls.append(inputs) or one_dnn(*inputs))
    with torch.no_grad():
        expected = network(states)
        assert not calls
        with fast_linear_layers:
            found = network(states)
    assert len(calls) == 4  # attention: what comes in, and what goes out; and two more
    torch.testing.assert_close(found, expected)


@needs_one_dnn
def test_gradients_and_other_numbers_are_left_to_torch(slow_mkl, monkeypatch):
    monkeypatch.setattr(products, "_one_dnn", lambda *_: pytest.fail("not for this"))
    network = Network()
    with fast_linear_layers:
        network(torch.randn(20, 3, 16)).sum().backward()
        with torch.no_grad():
            network.double()(torch.randn(20, 3, 16).double())
    assert network.layers[0].weight.grad.abs().sum() > 0


def test_torch_has_its_own_function_back(slow_mkl):
    own = F.linear
    with fast_linear_layers:
        with pytest.raises(ValueError), fast_linear_layers:
            raise ValueError
        assert F.linear is not own  # the first user is still in it
    assert F.linear is own


@pytest.mark.parametrize(
    "text, vendor", [("processor : 0\nvendor_id\t: AuthenticAMD\n", "AuthenticAMD"), ("CPU part: 0xd40\n", "")]
)
def test_vendor_of_the_processor(tmp_path, monkeypatch, text, vendor):
    monkeypatch.setattr(machine, "PROCESSOR", tmp_path / "cpuinfo")
    assert machine.processor_vendor() == ""  # another system than Linux
    (tmp_path / "cpuinfo").write_text(text)
    assert machine.processor_vendor() == vendor


@pytest.mark.parametrize(
    "capability, vendor, slow",
    [("AVX512", "AuthenticAMD", True), ("AVX512", "GenuineIntel", False), ("AVX2", "AuthenticAMD", False),
     ("AVX512", "", False)],
)  # fmt: skip
@needs_one_dnn
def test_where_mkl_is_slow(monkeypatch, capability, vendor, slow):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(products, "processor_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert products._mkl_is_slow() == slow
