"""The matrix product under every weight, and the memory layouts that make it fast on CPU."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxlm.core import backend
from jaxlm.core.precision import Precision
from jaxlm.ops import quantize
from jaxlm.ops.quantize import E4M3, E5M2, INT8, NumberFormat
from jaxlm.ops.row_product import Side, dot_rows, is_one_cpu
from jaxlm.parallel import context

# Formats of the operands, and of gradient and weight, by `precision.products`.
FORWARD = {"int8": (INT8, INT8), "fp8": (E4M3, E4M3)}
BACKWARD = {"int8": (INT8, INT8), "fp8": (E5M2, E4M3)}
# XLA for CPU computes x^T g of float32 1.3 to 7 times as fast with g first if g has at most an
# eighth of x's columns (jax 0.12, Intel, 128 to 3072 columns of x): the gradient of LoRA's A.
NARROW = 8
# Rows of `grouped_matmul` from which on tiles are used, and the rows of a tile.
FEWEST_TILED, SMALLEST_TILE, LARGEST_TILE = 256, 32, 256


def transposed(x: Array) -> Array:
    """Return x[..., M, N] as [..., N, M]; for bfloat16 on one CPU also in memory.

    XLA for CPU multiplies in bfloat16 only if it contracts rows of the first factor with columns
    of the second in their memory layout; otherwise it converts and multiplies in float32. With AMX
    a transpose costs a third to a sixth of that.
    """
    swapped = jnp.swapaxes(x, -1, -2)
    if x.dtype == jnp.bfloat16 and is_one_cpu():
        return with_layout_constraint(swapped, Layout(tuple(range(x.ndim))))
    return swapped


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def matmul(
    x: Array, weight: Array, precision: Precision, result: jnp.dtype | None = None, side: Side = 0
) -> Array:
    """Return x[..., I] @ weight[I, O] with float32 sums, forward and backward.

    JAX's own transpose would multiply a float32 cotangent in the backward pass and round the
    weight's gradient to the compute dtype. Here both operands are cast first, and the weight's
    gradient leaves the accumulator in `precision.reduce`.

    With `precision.products` operands are quantized: in fp8 for all three products, in int8 not
    for the weight's gradient, whose sum over all tokens suffers most (Wortsman et al. 2023,
    arXiv:2304.13013, section 2).

    Args:
      weight: [I, O], or [O, I] for `side` 1.
      precision: dtypes of operands (`compute`), sums and results.
      result: dtype of the product; that of activations by default.
      side: the weight's axis I.
    """
    return _forward(x, weight, precision, result, side)[0]


def _forward(
    x: Array, weight: Array, precision: Precision, result: jnp.dtype | None, side: Side
) -> tuple[Array, tuple[Array, Array]]:
    x_low, weight_low = x.astype(precision.compute), weight.astype(precision.compute)
    formats = FORWARD.get(precision.products)
    out = _dot(x_low, weight_low, side, result or precision.activations, formats)
    return out, (x_low, weight)


def _input_gradient(out_grad: Array, weight: Array, precision: Precision, side: Side) -> Array:
    grad_low, weight_low = out_grad.astype(precision.compute), weight.astype(precision.compute)
    formats = BACKWARD.get(precision.products)
    return _dot(grad_low, weight_low, 0 if side else 1, precision.activations, formats)


def _backward(
    precision: Precision, _result: Any, side: Side, residuals: tuple[Array, Array], out_grad: Array
) -> tuple[Array, Array]:
    x_low, weight = residuals
    x_grad = _input_gradient(out_grad, weight, precision, side)
    weight_grad = _weight_gradient(x_low, out_grad, precision, side)
    return x_grad, weight_grad.astype(weight.dtype)


def _weight_gradient(x_low: Array, out_grad: Array, precision: Precision, side: Side) -> Array:
    """Return x^T out_grad, or its transpose for `side` 1, in `precision.reduce`."""
    grad_low = out_grad.astype(precision.compute)
    if _merges_rows():
        x_low = x_low.reshape(-1, x_low.shape[-1])
        grad_low = grad_low.reshape(-1, grad_low.shape[-1])
    (one, low), (other, other_low) = ((x_low, E4M3), (grad_low, E5M2))[:: -1 if side else 1]
    rows = tuple(range(one.ndim - 1))
    dot = functools.partial(lax.dot_general, preferred_element_type=precision.reduce)
    if precision.products == "fp8":
        return quantize.dot(one, other, (rows, rows), (low, other_low), precision.reduce)
    if precision.compute == jnp.bfloat16 and is_one_cpu():
        # XLA would merge a transpose of the result into the product, in a form that it compiles
        # and cannot run: hence the barrier.
        axes = (((1,), (0,)), ((), ()))
        return lax.optimization_barrier(dot(transposed(one), other, axes))
    if NARROW * other.shape[-1] <= one.shape[-1] and is_one_cpu():
        # XLA would merge this transpose into the product too.
        return lax.optimization_barrier(dot(other, one, ((rows, rows), ((), ())))).T
    return dot(one, other, ((rows, rows), ((), ())))


matmul.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def stored_matmul(
    x: Array,
    stored: Any,
    read: Callable[[Any], Array],
    precision: Precision,
    result: jnp.dtype | None = None,
) -> Array:
    """Return x[..., I] @ read(stored)[I, O] as `matmul`, of a weight that is not trained.

    The backward pass reads the weight again: its values and x are not kept.

    Args:
      stored: arrays of the weight; their gradient is 0.
      read: function of them to the weight.
      precision: dtypes of operands (`compute`), sums and results.
      result: dtype of the product; that of activations by default.
    """
    return _forward(x, read(stored), precision, result, 0)[0]


def _stored_forward(
    x: Array, stored: Any, read: Any, precision: Precision, result: jnp.dtype | None
) -> tuple[Array, Any]:
    return _forward(x, read(stored), precision, result, 0)[0], stored


def _stored_backward(
    read: Any, precision: Precision, _result: Any, stored: Any, out_grad: Array
) -> tuple[Array, None]:
    return _input_gradient(out_grad, read(stored), precision, 0), None


stored_matmul.defvjp(_stored_forward, _stored_backward)


def _dot(
    x: Array,
    weight: Array,
    side: Side,
    result: jnp.dtype,
    formats: tuple[NumberFormat, NumberFormat] | None,
) -> Array:
    """Contract x's last axis with axis `side` of the weight, quantized to `formats` if given.

    On CPU the leading axes of x are merged first: GPT-2 124M trained 1.45 times as fast (2 cores,
    jax 0.12).
    """
    shape = x.shape
    if _merges_rows():
        x = x.reshape(-1, shape[-1])
    axes = ((x.ndim - 1,), (side,))
    if formats:
        out = quantize.dot(x, weight, axes, formats, result)
    elif x.ndim == 2:
        out = dot_rows(x, weight, side, result)
    else:
        out = lax.dot_general(x, weight, (axes, ((), ())), preferred_element_type=result)
    return out.reshape(*shape[:-1], out.shape[-1])


def _merges_rows() -> bool:
    # Batch and context cannot split a merged axis as they split its two parts: XLA would gather.
    return backend.name() == "cpu" and context.context_size() == 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(
    x: Array,
    weights: Array,
    sizes: Array | None,
    precision: Precision,
    tile: int | None = None,
) -> Array:
    """Multiply each group of rows with its own weight, in the dtypes of `matmul`, not quantized.

    With `sizes`, the first sizes[0] rows of x[M, I] meet weights[0, I, O], the next sizes[1]
    weights[1], and so on; rows after the last group are undefined. Without, x is [E, C, I]: groups
    of one size.

    2 M I O FLOPs on TPUs, or without `sizes`. On CPUs and GPUs XLA computes a ragged product as a
    dense one of 2 E M I O FLOPs, and copies x for each weight: E M I numbers (see
    `models.cost.model_cost`).

    Args:
      x: rows.
      weights: one weight for each group.
      sizes: rows of each group.
      precision: dtypes of operands, sums and results.
      tile: rows of a group that are multiplied at a time, in a loop over groups and their tiles:
        2 M I O FLOPs on any platform, and those of half a tile more for each group. None for XLA's
        ragged product. See `group_tile`.
    """
    return _grouped_forward(x, weights, sizes, precision, tile)[0]


def group_tile(rows: int, groups: int) -> int | None:
    """Return the rows of a tile of `grouped_matmul` on this platform; None for none.

    On one core of an Intel Xeon with AMX (jax 0.12) 4,096 rows of 256 and 64 weights of [256, 256]
    took 232 ms with XLA's ragged product and 10 with tiles in float32, 127 and 4 in bfloat16;
    with 512 inputs and 8 weights of [512, 2048] 249 and 51, 199 and 32.
    """
    # A pipeline maps the stages, and JAX does not map scalars of a loop within `shard_map`.
    is_pipeline = jax.sharding.get_abstract_mesh().shape.get("pipe", 1) > 1
    if backend.name() != "cpu" or is_pipeline or rows < FEWEST_TILED:
        return None
    half = max(rows // (2 * groups), 1)
    return min(max(1 << (half - 1).bit_length(), SMALLEST_TILE), LARGEST_TILE)


def _grouped_forward(
    x: Array, weights: Array, sizes: Array | None, precision: Precision, tile: int | None
) -> tuple[Array, tuple[Array, Array, Array | None]]:
    x_low, weights_low = x.astype(precision.compute), weights.astype(precision.compute)
    out = _grouped(x_low, weights_low, sizes, precision.activations, tile, 0)
    return out, (x_low, weights, sizes)


def _grouped_backward(
    precision: Precision,
    tile: int | None,
    residuals: tuple[Array, Array, Array | None],
    out_grad: Array,
) -> tuple[Array, Array, None]:
    x_low, weights, sizes = residuals
    grad_low, weights_low = (each.astype(precision.compute) for each in (out_grad, weights))
    x_grad = _grouped(grad_low, weights_low, sizes, precision.activations, tile, 1)
    if sizes is None:
        weights_grad = lax.dot_general(
            x_low, grad_low, (((1,), (1,)), ((0,), (0,))), preferred_element_type=precision.reduce
        )
    elif tile is None:
        rows = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        weights_grad = lax.ragged_dot_general(
            x_low, grad_low, sizes, rows, preferred_element_type=precision.reduce
        )
    else:
        weights_grad = _tiled_weight_gradient(x_low, grad_low, sizes, precision, tile)
    return x_grad, weights_grad.astype(weights.dtype), None


grouped_matmul.defvjp(_grouped_forward, _grouped_backward)


def _grouped(
    x: Array,
    weights: Array,
    sizes: Array | None,
    result: jnp.dtype,
    tile: int | None,
    side: Side,
) -> Array:
    """Return the products with weights [E, I, O], or [E, O, I] for `side` 1."""
    if sizes is not None and tile is not None:
        return _tiled(x, weights, sizes, result, tile, side)
    weights = jnp.swapaxes(weights, 1, 2) if side else weights
    if sizes is not None:
        return lax.ragged_dot(x, weights, sizes, preferred_element_type=result)
    return lax.dot_general(x, weights, (((2,), (1,)), ((0,), (0,))), preferred_element_type=result)


def _tiled(
    x: Array, weights: Array, sizes: Array, result: jnp.dtype, tile: int, side: Side
) -> Array:
    """Return the products of groups by tiles of rows.

    The last tile of a group also writes rows of later groups, which write them again.
    """
    padded = jnp.pad(x, ((0, tile), (0, 0)))
    outs = weights.shape[1 if side else 2]

    def group(out: Array, inputs: tuple[Array, Array, Array]) -> tuple[Array, None]:
        weight, first, size = inputs

        def multiply(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            done, out = carry
            rows = lax.dynamic_slice_in_dim(padded, first + done, tile)
            axes = (((1,), (side,)), ((), ()))
            new = lax.dot_general(rows, weight, axes, preferred_element_type=result)
            return done + tile, lax.dynamic_update_slice_in_dim(out, new, first + done, 0)

        start = (_varying_as(jnp.int32(0), first), out)
        return lax.while_loop(lambda carry: carry[0] < size, multiply, start)[1], None

    empty = _varying_as(jnp.zeros((len(padded), outs), result), x, weights, sizes)
    out, _ = lax.scan(group, empty, (weights, jnp.cumsum(sizes) - sizes, sizes))
    return out[: len(x)]


def _tiled_weight_gradient(
    x: Array, out_grad: Array, sizes: Array, precision: Precision, tile: int
) -> Array:
    """Return x^T out_grad of each group [E, I, O], in `precision.reduce`."""
    padded = [jnp.pad(each, ((0, tile), (0, 0))) for each in (x, out_grad)]
    plain = dataclasses.replace(precision, products="compute")

    def group(_: None, inputs: tuple[Array, Array]) -> tuple[None, Array]:
        first, size = inputs

        def add(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            done, total = carry
            rows, grad = (lax.dynamic_slice_in_dim(each, first + done, tile) for each in padded)
            is_here = (done + jnp.arange(tile) < size)[:, None]
            return done + tile, total + _weight_gradient(
                jnp.where(is_here, rows, 0), grad, plain, 0
            )

        empty = jnp.zeros((x.shape[1], out_grad.shape[1]), precision.reduce)
        start = (_varying_as(jnp.int32(0), first), _varying_as(empty, x, out_grad, sizes))
        return None, lax.while_loop(lambda carry: carry[0] < size, add, start)[1]

    return lax.scan(group, None, (jnp.cumsum(sizes) - sizes, sizes))[1]


def _varying_as(value: Array, *others: Array) -> Array:
    """Mark a value as varying over the mesh axes of a `shard_map` over which others vary.

    The first operation of a loop would mark it otherwise, and a carry keeps its type. A condition
    that is never true has the mark of its operands, in all versions of JAX.
    """
    first = [each[(0,) * each.ndim] > 0 for each in others]
    never = functools.reduce(jnp.logical_or, first) & False
    return jnp.where(never, jnp.ones_like(value), value)
