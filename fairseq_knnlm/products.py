"""Matrix products in single precision, by the library that is fast on this processor.

On a CPU torch hands them to Intel's MKL, whose code for AVX-512 serves Intel's own processors only: on others it has
half the speed or less. oneDNN, which is part of torch as well, makes no such difference. It prepares itself for every
new shape, which takes longer than a product of some hundred rows does; so numbers of rows are rounded up to a few.
"""

from threading import Lock
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .machine import processor_vendor

FEWEST_VECTORS = 32  # from which on oneDNN is faster
torch_linear = F.linear


def product_by_torch(vectors: Tensor, rows: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """The product of all vectors with all rows, without gradients: (n, dim), (m, dim) -> (n, m).

    Each row of the result is contiguous; there may be a gap between two of them.

    Args:
        bias: (m,), which is added to each row of the result
    """
    return torch.mm(vectors, rows.t()) if bias is None else torch.addmm(bias, vectors, rows.t())


def product_by_one_dnn(
    vectors: Tensor, rows: Tensor, bias: Optional[Tensor] = None, fewest: int = FEWEST_VECTORS
) -> Tensor:
    """The same; on other devices, and of other numbers than single precision, what torch does."""
    count, columns = vectors.size(0), rows.size(0)
    floats = vectors.dtype == torch.float32 and rows.dtype == torch.float32
    if not vectors.is_cpu or not floats or count < fewest:  # they are faster as they are
        return product_by_torch(vectors, rows, bias)
    rows = _pad(rows)
    if bias is not None:
        bias = F.pad(bias, [0, rows.size(0) - columns])
    return _one_dnn(vectors, rows, bias)[:, :columns]


def _one_dnn(vectors: Tensor, rows: Tensor, bias: Optional[Tensor]) -> Tensor:
    count = vectors.size(0)
    return torch.ops.mkldnn._linear_pointwise(_pad(vectors), rows.contiguous(), bias, "none", [], "")[:count]


def _pad(rows: Tensor) -> Tensor:
    """Rows of zeros at the end: multiples of 16 rows, from 128 on of 64, and from 1,024 on of 256."""
    count = rows.size(0)
    step = 16 if count < 128 else 64 if count < 1024 else 256
    missing = -count % step
    return rows if missing == 0 else F.pad(rows, [0, 0, 0, missing])


def _mkl_is_slow() -> bool:
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and processor_vendor() not in ("", "GenuineIntel")
    )


MKL_IS_SLOW = _mkl_is_slow()
product = product_by_one_dnn if MKL_IS_SLOW else product_by_torch  # of the two, TorchScript compiles this one


class _FastLinearLayers:
    """Lets the linear layers of any model use ``product``, for a while; several threads may be in it at once.

    Layers of all kinds, fairseq's attention among them, call torch.nn.functional.linear, so that is what is replaced.
    Where gradients are wanted, or anything but a product of floats on a CPU, torch's own function does the work.
    """

    def __init__(self) -> None:
        self._lock, self._users = Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if MKL_IS_SLOW:
                F.linear = _linear

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                F.linear = torch_linear


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As torch.nn.functional.linear: (..., dim), (m, dim), (m,) -> (..., m)."""
    floats = input.dtype == weight.dtype == torch.float32 and (bias is None or bias.dtype == torch.float32)
    if torch.is_grad_enabled() or not floats or not input.is_cpu or weight.dim() != 2 or input.dim() < 2:
        return torch_linear(input, weight, bias)
    vectors = input.reshape(-1, input.size(-1))
    if len(vectors) < FEWEST_VECTORS:
        return torch_linear(input, weight, bias)
    return _one_dnn(vectors, weight, bias).view(*input.shape[:-1], len(weight))


fast_linear_layers = _FastLinearLayers()
