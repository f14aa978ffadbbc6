"""Matrix products with Keras's dtype rules, and the choice between one kernel and two.

`x @ kernel + bias` can be one `addmm`. Where that sums in another order than a product
followed by an addition, the result differs in the last bit, and Keras's two steps are kept.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from keras_turbo import compat

# A matrix library sums long rows in blocks and adds the bias to the first one. Rows up to
# this length were one block on every processor tried; the probe below makes sure.
_ONE_BLOCK = 192


def result_dtype(*values: Any) -> torch.dtype:
    """Keras's promoted dtype for traced tensors, by the installed Keras's own table."""
    return compat.result_type(*(value.dtype for value in values))


def matmul(a: Any, b: Any) -> Any:
    """`keras.ops.matmul` of two traced tensors."""
    both_int8 = a.dtype == torch.int8 and b.dtype == torch.int8
    result = torch.int32 if both_int8 else result_dtype(a, b)
    compute = result
    if compute == torch.bool:
        compute = compat.to_torch_dtype(compat.backend.floatx())
    if a.device.type == "cpu" and compute == torch.float16:
        compute = torch.float32
    if a.device.type == "cuda" and not compute.is_floating_point:
        compute = compat.to_torch_dtype(compat.backend.floatx())
    return cast(torch.matmul(cast(a, compute), cast(b, compute)), result)


@dataclass(frozen=True)
class Product:
    """An einsum equation that is a matrix product in disguise.

    Attributes:
        contracted: how many trailing axes of the input, and as many leading axes of the
            kernel, are summed over.
        outputs: how many trailing axes of the kernel reach the output.
    """

    contracted: int
    outputs: int


@functools.lru_cache(maxsize=4096)
def product_of(equation: str, rank: int) -> Product | None:
    """How an equation for an input of a rank is a matrix product, or None if it is none.

    Example:

    >>> from keras_turbo.rules.matmul import product_of
    >>> product_of("abc,cde->abde", 3)
    Product(contracted=1, outputs=2)
    """
    operands, arrow, result = equation.replace(" ", "").partition("->")
    left, comma, right = operands.partition(",")
    if not arrow or not comma or "," in right:
        return None
    if left.startswith("...") and result.startswith("..."):
        batch = rank - len(left) + 3
        fill = "".join(chr(0x100 + i) for i in range(max(batch, 0)))
        left, result = left.replace("...", fill), result.replace("...", fill)
    if "..." in left + right + result or len(left) != rank:
        return None
    if len(set(left)) != len(left) or len(set(right)) != len(right):
        return None
    shared = [axis for axis in right if axis in left]
    count = len(shared)
    summed, kept = left[rank - count :], right[count:]
    if not 0 < count < rank or not kept or list(summed) != shared or right[:count] != summed:
        return None
    return Product(count, len(kept)) if result == left[: rank - count] + kept else None


def einsum(equation: str, a: Any, b: Any) -> Any:
    """`keras.ops.einsum` of two traced tensors."""
    if a.dtype == torch.int8 and b.dtype == torch.int8:
        compute = torch.int32 if a.device.type == "cpu" else torch.float32
        return cast(torch.einsum(equation, cast(a, compute), cast(b, compute)), torch.int32)
    return torch.einsum(equation, a, b)


def product_and_bias(x: Any, kernel: Any, bias: Any) -> Any:
    """`x @ kernel + bias` with Keras's dtype rules, bit for bit as stock Keras computes it."""
    if bias is not None and _one_kernel(x, kernel, bias):
        return torch.addmm(bias, x, kernel)
    product = matmul(x, kernel)
    return product if bias is None else torch.add(product, bias)


def _one_kernel(x: Any, kernel: Any, bias: Any) -> bool:
    if not (x.dtype == kernel.dtype == bias.dtype == torch.float32 and x.ndim == 2):
        return False
    rows, columns = kernel.shape
    if x.device.type != "cpu" or kernel.metas[0].stride() != (1, rows):
        return False
    return rows <= _ONE_BLOCK and columns > 1 and _same_bits(rows, columns)


@functools.lru_cache(maxsize=4096)
def _same_bits(rows: int, columns: int) -> bool:
    """Whether `addmm` equals a product and an addition to the bit, on this machine."""
    generator = torch.Generator().manual_seed(0)
    kernel = torch.randn(columns, rows, generator=generator).t()
    bias = torch.randn(columns, generator=generator)
    with torch.no_grad():
        for batch in (1, 3, 8, 17, 32):
            x = torch.randn(batch, rows, generator=generator)
            if not torch.equal(torch.addmm(bias, x, kernel), torch.matmul(x, kernel) + bias):
                return False
    return True


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A traced tensor in another dtype; itself where it has it already."""
    return value if value.dtype == dtype else value.to(dtype)
