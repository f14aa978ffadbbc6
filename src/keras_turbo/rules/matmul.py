"""Matrix products with Keras's dtype rules, and the choice between one kernel and two.

`x @ kernel + bias` can be one `addmm`. Where that sums in another order than a product
followed by an addition, the result differs in the last bit, and Keras's two steps are kept.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from keras.src.backend.common import dtypes

from keras_turbo import compat

# A matrix library sums long rows in blocks and adds the bias to the first one. Rows up to
# this length were one block on every processor tried; the probe below makes sure.
_ONE_BLOCK = 192


def result_dtype(*values: Any) -> torch.dtype:
    """Keras's promoted dtype for traced tensors, by the installed Keras's own table."""
    return compat.to_torch_dtype(dtypes.result_type(*(value.dtype for value in values)))


def matmul(a: Any, b: Any) -> Any:
    """`keras.ops.matmul` of two traced tensors."""
    if a.dtype == torch.int8 and b.dtype == torch.int8:
        result = torch.int32
    else:
        result = result_dtype(a, b)
    compute = result
    if compute == torch.bool:
        compute = compat.to_torch_dtype(compat.backend.floatx())
    if a.device.type == "cpu" and compute == torch.float16:
        compute = torch.float32
    if a.device.type == "cuda" and not compute.is_floating_point:
        compute = compat.to_torch_dtype(compat.backend.floatx())
    return _cast(torch.matmul(_cast(a, compute), _cast(b, compute)), result)


def product_and_bias(ctx: Any, x: Any, kernel: Any, bias: Any) -> Any:
    """`x @ kernel + bias` with Keras's dtype rules, bit for bit as stock Keras computes it."""
    if bias is not None and _one_kernel(x, kernel, bias):
        return torch.addmm(bias, x, kernel)
    product = matmul(x, kernel)
    return product if bias is None else torch.add(product, bias)


def _one_kernel(x: Any, kernel: Any, bias: Any) -> bool:
    if not (x.dtype == kernel.dtype == bias.dtype == torch.float32 and x.ndim == 2):
        return False
    rows, columns = kernel.shape
    if x.device.type != "cpu":
        return False
    return rows <= _ONE_BLOCK and columns > 1 and _same_bits(rows, columns)


@functools.lru_cache(maxsize=4096)
def _same_bits(rows: int, columns: int) -> bool:
    """Whether `addmm` equals a product and an addition to the bit, on this machine."""
    generator = torch.Generator().manual_seed(0)
    kernel = torch.randn(rows, columns, generator=generator)
    bias = torch.randn(columns, generator=generator)
    with torch.no_grad():
        for batch in (1, 3, 8, 17, 32):
            x = torch.randn(batch, rows, generator=generator)
            if not torch.equal(torch.addmm(bias, x, kernel), torch.matmul(x, kernel) + bias):
                return False
    return True


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value if value.dtype == dtype else value.to(dtype)
