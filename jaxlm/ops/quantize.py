"""Matrix products with operands quantized to eight bits."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxlm.ops.row_product import dot_rows


class NumberFormat(NamedTuple):
    """A target of quantization; a scale maps an operand's largest magnitude to `largest`."""

    dtype: jnp.dtype
    largest: float
    has_scales: bool  # a scale for each row of the product, not one for the tensor


# Symmetric: -128 is not used. Dettmers et al. 2022, arXiv:2208.07339, section 2 (a scale for each
# row and column).
INT8 = NumberFormat(jnp.dtype("int8"), 127.0, True)
# Micikevicius et al. 2022, arXiv:2209.05433: precision for operands, range for gradients.
E4M3 = NumberFormat(jnp.dtype("float8_e4m3fn"), 448.0, False)
E5M2 = NumberFormat(jnp.dtype("float8_e5m2"), 57344.0, False)


def dot(
    a: Array,
    b: Array,
    axes: tuple[Sequence[int], Sequence[int]],
    formats: tuple[NumberFormat, NumberFormat],
    result: jnp.dtype,
) -> Array:
    """Return the product of a and b with quantized operands.

    Scales are those of the operand itself ("current scaling"), so no state is stored between
    steps. An operand that is not finite gives a result that is not finite.

    Args:
      axes: summed axes of each operand.
      formats: of the operands; both of integers, summed in int32, or both of floats, in float32.
      result: dtype of the product.
    """
    one, other = map(rounded, (a, b), formats, axes)
    return dot_rounded(one, other, axes, result)


def dot_rounded(
    one: tuple[Array, Array],
    other: tuple[Array, Array],
    axes: tuple[Sequence[int], Sequence[int]],
    result: jnp.dtype,
) -> Array:
    """Return the product of two operands that `rounded` gave, summed over `axes` of each."""
    (a_low, a_scale), (b_low, b_scale) = one, other
    is_integer = jnp.issubdtype(a_low.dtype, jnp.integer)
    sums = jnp.dtype("int32" if is_integer else "float32")
    out = _dot(a_low, b_low, (tuple(axes[0]), tuple(axes[1])), sums)
    a_scale, b_scale = a_scale.squeeze(tuple(axes[0])), b_scale.squeeze(tuple(axes[1]))
    a_scale = a_scale.reshape(*a_scale.shape, *(1 for _ in b_scale.shape))
    b_scale = b_scale.reshape(*(1 for _ in range(out.ndim - b_scale.ndim)), *b_scale.shape)
    return (out.astype(jnp.float32) * a_scale * b_scale).astype(result)


def _dot(
    a: Array, b: Array, axes: tuple[tuple[int, ...], tuple[int, ...]], sums: jnp.dtype
) -> Array:
    if a.ndim == b.ndim == 2 and axes[0] == (1,):
        return dot_rows(a, b, 1 if axes[1] == (1,) else 0, sums)
    return lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=sums)


def rounded(x: Array, format: NumberFormat, summed: Sequence[int]) -> tuple[Array, Array]:
    """Return x / scale in the format's dtype, rounded to nearest even, and the float32 scale.

    There is one scale, or one for each index of the axes that the product does not sum over; it
    has as many axes as x.
    """
    axes = tuple(summed) if format.has_scales else None
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True).astype(jnp.float32)
    # A scale that is no normal number would be 0 on most devices.
    is_tiny = largest < format.largest * jnp.finfo(jnp.float32).tiny
    scale = jnp.where(is_tiny, 1.0, largest / format.largest)
    # The quotient of the largest may be rounded up, past the format's range.
    low = jnp.clip(x.astype(jnp.float32) / scale, -format.largest, format.largest)
    if jnp.issubdtype(format.dtype, jnp.integer):
        low = jnp.round(low)
    return low.astype(format.dtype), scale
