"""Products of rounded rows with weights of integers: those of `w8a8` and `w4a8`."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxlm.core.precision import Precision
from jaxlm.ops import matmul as products
from jaxlm.ops import quantize
from jaxlm.ops.kernels import INTEGERS
from jaxlm.ops.row_product import Side, decode_layout, dot_rows
from jaxlm.ops.weight_codes import Leaves, WeightFormat

FORMATS: dict[str, WeightFormat] = {
    "w8a8": WeightFormat("w8a8", "all"),
    "w4a8": WeightFormat("w4a8", "all"),
    "int4": WeightFormat("int4", 128),
}


def is_integer(format: WeightFormat) -> bool:
    """Return whether products have integer operands."""
    return format.base in INTEGERS


def integer_product(
    x: Array, leaves: Leaves, format: WeightFormat, result: jnp.dtype, side: Side = 0
) -> Array:
    """Return x[..., I] @ W[I, O] with x rounded to 8 bits, a scale for each row, and int32 sums.

    The sums are exact, so the result does not depend on their order. Codes of 4 bits are two
    products, of the even inputs and of the odd ones: no array of all codes in their order is made.

    Args:
      x: rows.
      leaves: of W as `WeightFormat.quantize` returns them, [.., O], or [O, ..] for side 1.
      format: w8a8 or w4a8.
      result: dtype of the product.
      side: the axis of inputs in the leaves.
    """
    rows = x.reshape(-1, x.shape[-1])
    low, scale = quantize.rounded(rows, quantize.INT8, (1,))
    codes, scales = leaves["codes"], leaves["scales"]
    if format.base == "w8a8":
        out = quantize.dot_rounded((low, scale), (codes, scales), ((1,), (side,)), result)
    else:
        low = jnp.pad(low, ((0, 0), (0, low.shape[1] % 2)))
        signed = (codes & 15).astype(jnp.int8) - 8, (codes >> 4).astype(jnp.int8) - 8
        sums = jnp.dtype("int32")
        even, odd = (
            dot_rows(low[:, first::2], codes, side, sums) for first, codes in enumerate(signed)
        )
        out = ((even + odd).astype(jnp.float32) * scale * scales.reshape(1, -1)).astype(result)
    return out.reshape(*x.shape[:-1], -1)


ROWS, INPUTS, OUTPUTS, TIMED = 8, 1024, 4096, 10  # of a measured product, and its repetitions


def describe_speed() -> str:
    """Return how fast this device multiplies integers, measured on one product of a few rows."""
    x, ones = jnp.ones((ROWS, INPUTS), jnp.float32), jnp.ones((INPUTS, OUTPUTS), jnp.float32)
    weight, side = decode_layout(ones, 0)
    product: Callable[..., Array] = functools.partial(dot_rows, side=side, sums=x.dtype)
    seconds = {"float32": _seconds(product, x, weight)}
    for name in ("w8a8", "w4a8"):
        leaves = {
            key: decode_layout(leaf, 0)[0] for key, leaf in FORMATS[name].quantize(ones).items()
        }
        product = functools.partial(
            integer_product, format=FORMATS[name], result=x.dtype, side=side
        )
        seconds[name] = _seconds(product, x, leaves)
    ratios = [f"{name} takes {each / seconds['float32']:.2f}" for name, each in seconds.items()]
    return f"of the time of a float32 product of {ROWS} rows, here {' and '.join(ratios[1:])}"


def _seconds(product: Callable[..., Array], *operands: Any) -> float:
    compiled, best = jax.jit(product), float("inf")
    for _ in range(TIMED):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*operands))
        best = min(best, time.perf_counter() - begin)
    return best


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def qat_matmul(
    x: Array, weight: Array, precision: Precision, result: jnp.dtype | None = None
) -> Array:
    """Return x[..., I] @ weight[I, O], computed as after quantization by `precision.qat`.

    Gradients are those of the product of x with the rounded weight, as if rounding were no
    function of its argument (straight through; Bengio et al. 2013, arXiv:1308.3432).
    """
    return _qat_forward(x, weight, precision, result)[0]


def _qat_forward(
    x: Array, weight: Array, precision: Precision, result: jnp.dtype | None
) -> tuple[Array, tuple[Array, Array]]:
    format, exact = FORMATS[precision.qat], precision.exact
    leaves = format.quantize(weight)
    if is_integer(format):
        return integer_product(x, leaves, format, result or precision.activations), (x, weight)
    dense = format.dequantize(leaves, len(weight))
    return products.matmul(x, dense, exact, result), (x, weight)


def _qat_backward(
    precision: Precision, result: jnp.dtype | None, residuals: tuple[Array, Array], grad: Array
) -> tuple[Array, Array]:
    x, weight = residuals
    format = FORMATS[precision.qat]
    dense = format.dequantize(format.quantize(weight), len(weight))
    pull = jax.vjp(lambda x, dense: products.matmul(x, dense, precision.exact, result), x, dense)[1]
    x_grad, weight_grad = pull(grad)
    return x_grad, weight_grad.astype(weight.dtype)


qat_matmul.defvjp(_qat_forward, _qat_backward)
