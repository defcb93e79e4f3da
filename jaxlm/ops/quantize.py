"""Matrix products of operands that are rounded to eight bits first."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Format(NamedTuple):
    """What an operand is rounded to, after a division by a scale that takes its largest magnitude to `largest`."""

    dtype: jnp.dtype
    largest: float
    has_scales: bool  # one for each row of the product instead of one for the tensor


# Symmetric: -128 is not used. Dettmers et al. 2022, arXiv:2208.07339, section 2 (a scale for each row and column).
INT8 = Format(jnp.dtype("int8"), 127.0, True)
# Micikevicius et al. 2022, arXiv:2209.05433: precision for operands, range for gradients.
E4M3 = Format(jnp.dtype("float8_e4m3fn"), 448.0, False)
E5M2 = Format(jnp.dtype("float8_e5m2"), 57344.0, False)


def dot(
    a: Array,
    b: Array,
    axes: tuple[Sequence[int], Sequence[int]],
    formats: tuple[Format, Format],
    result: jnp.dtype,
) -> Array:
    """The product of a and b, summed over these axes of each, with operands rounded; in `result`.

    Both formats are of integers, summed in int32, or both of floats, summed in float32. Scales are those of this very
    operand ("current scaling"), so nothing is remembered from step to step. An operand that is not finite gives a result
    that is not.
    """
    (a_low, a_scale), (b_low, b_scale) = map(rounded, (a, b), formats, axes)
    is_whole = jnp.issubdtype(a_low.dtype, jnp.integer)
    out = lax.dot_general(
        a_low,
        b_low,
        ((tuple(axes[0]), tuple(axes[1])), ((), ())),
        preferred_element_type=jnp.int32 if is_whole else jnp.float32,
    )
    a_scale, b_scale = (
        scale.squeeze(tuple(summed)) for scale, summed in zip((a_scale, b_scale), axes, strict=True)
    )
    a_scale = a_scale.reshape(*a_scale.shape, *(1 for _ in b_scale.shape))
    b_scale = b_scale.reshape(*(1 for _ in range(out.ndim - b_scale.ndim)), *b_scale.shape)
    return (out.astype(jnp.float32) * a_scale * b_scale).astype(result)


def rounded(x: Array, format: Format, summed: Sequence[int]) -> tuple[Array, Array]:
    """x / scale in the format's dtype, nearest even, and the scale, float32 with as many axes as x.

    The scale is one for the tensor, or one for each index of the axes that the product does not sum over.
    """
    axes = tuple(summed) if format.has_scales else None
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True).astype(jnp.float32)
    scale = jnp.where(largest == 0, 1.0, largest / format.largest)
    # The quotient of the largest may be rounded up, past what the format holds.
    low = jnp.clip(x.astype(jnp.float32) / scale, -format.largest, format.largest)
    if jnp.issubdtype(format.dtype, jnp.integer):
        low = jnp.round(low)
    return low.astype(format.dtype), scale
