"""The matrix product under every weight."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxlm.core import backend
from jaxlm.core.precision import Precision
from jaxlm.ops import layouts, quantize
from jaxlm.ops.layouts import Side
from jaxlm.ops.quantize import E4M3, E5M2, INT8, Format
from jaxlm.parallel import context

# Of the operands, and of the gradient beside the weight, by `precision.products`.
FORWARD = {"int8": (INT8, INT8), "fp8": (E4M3, E4M3)}
BACKWARD = {"int8": (INT8, INT8), "fp8": (E5M2, E4M3)}


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def matmul(
    x: Array,
    weight: Array,
    precision: Precision,
    result: jnp.dtype | None = None,
    side: Side = 0,
) -> Array:
    """x[..., I] @ weight[I, O], with operands in `precision.compute` and float32 sums, forward and backward.

    With `side` 1 the weight is [O, I], and is read as it lies. The product comes out in `result`, by default the dtype of activations.
    The transpose that JAX derives would multiply a float32 cotangent in the backward pass and round the weight's
    gradient to the compute dtype. Here both operands are cast first, and the weight's gradient comes out of the
    accumulator in `precision.reduce`.

    By `precision.products`, operands are rounded further. fp8 does so in all three products; int8 not in that of the
    weight's gradient, whose sum over all tokens suffers most from it (Wortsman et al. 2023, arXiv:2304.13013, section 2).
    """
    return _forward(x, weight, precision, result, side)[0]


def _forward(
    x: Array, weight: Array, precision: Precision, result: jnp.dtype | None, side: Side
) -> tuple[Array, tuple[Array, Array]]:
    x_low, weight_low = x.astype(precision.compute), weight.astype(precision.compute)
    formats = FORWARD.get(precision.products)
    out = _dot(x_low, weight_low, side, result or precision.activations, formats)
    return out, (x_low, weight)


def _backward(
    precision: Precision,
    result: jnp.dtype | None,
    side: Side,
    kept: tuple[Array, Array],
    out_grad: Array,
) -> tuple[Array, Array]:
    x_low, weight = kept
    grad_low = out_grad.astype(precision.compute)
    formats = BACKWARD.get(precision.products)
    weight_low = weight.astype(precision.compute)
    x_grad = _dot(grad_low, weight_low, _other(side), precision.activations, formats)
    if _is_flat():
        x_low = x_low.reshape(-1, x_low.shape[-1])
        grad_low = grad_low.reshape(-1, grad_low.shape[-1])
    (one, low), (other, other_low) = ((x_low, E4M3), (grad_low, E5M2))[:: -1 if side else 1]
    rows = tuple(range(one.ndim - 1))
    if precision.products == "fp8":
        weight_grad = quantize.dot(one, other, (rows, rows), (low, other_low), precision.reduce)
    elif precision.compute == jnp.bfloat16 and layouts.is_one_cpu():
        weight_grad = _over_rows(one, other, precision.reduce)
    else:
        weight_grad = lax.dot_general(
            one, other, ((rows, rows), ((), ())), preferred_element_type=precision.reduce
        )
    return x_grad, weight_grad.astype(weight.dtype)


matmul.defvjp(_forward, _backward)


def _dot(
    x: Array, weight: Array, side: Side, result: jnp.dtype, formats: tuple[Format, Format] | None
) -> Array:
    """x's last axis against axis `side` of the weight, in these formats or as they are.

    On CPU the leading axes of x are merged first: GPT-2 124M trained 1.45 times as fast that way (2 cores, jax 0.12). A row
    that is alone there comes twice: XLA has a loop of its own for it in bfloat16, which takes 7 times as long as two rows.
    """
    shape = x.shape
    if _is_flat():
        x = x.reshape(-1, shape[-1])
    if is_alone := x.shape[0] == 1 and x.dtype == jnp.bfloat16 and layouts.is_one_cpu():
        x = jnp.broadcast_to(x, (2, *x.shape[1:]))
    axes = ((x.ndim - 1,), (side,))
    if formats:
        out = quantize.dot(x, weight, axes, formats, result)
    else:
        out = lax.dot_general(x, weight, (axes, ((), ())), preferred_element_type=result)
    if is_alone:
        out = out[:1]
    return out.reshape(*shape[:-1], out.shape[-1])


def _over_rows(one: Array, other: Array, result: jnp.dtype) -> Array:
    """one[M, I] transposed times other[M, O], in bfloat16 on a CPU.

    A transpose of the result would be merged into the product, whose form XLA then compiles and cannot run: hence the barrier.
    """
    product = lax.dot_general(
        layouts.turned(one), other, (((1,), (0,)), ((), ())), preferred_element_type=result
    )
    return lax.optimization_barrier(product)


def _other(side: Side) -> Side:
    return 0 if side else 1


def _is_flat() -> bool:
    # A merged axis cannot be split as rows and context split its two parts: tokens would be gathered.
    return backend.name() == "cpu" and context.context_size() == 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(x: Array, weights: Array, sizes: Array | None, precision: Precision) -> Array:
    """Each group of rows times its own weight, with the dtypes of `matmul`, never rounded further.

    With `sizes`, the first sizes[0] rows of x[M, I] meet weights[0, I, O], the next sizes[1] weights[1], and so on; rows
    after the last group come out undefined. Without, x is [E, C, I]: groups of one size.

    2 M I O FLOPs on TPUs, or without `sizes`. On CPUs and GPUs XLA computes a ragged product as a
    dense one, of 2 E M I O FLOPs, and copies x for each weight: E M I numbers (`models.routed`).
    """
    return _grouped_forward(x, weights, sizes, precision)[0]


def _grouped_forward(
    x: Array, weights: Array, sizes: Array | None, precision: Precision
) -> tuple[Array, tuple[Array, Array, Array | None]]:
    x_low, low = x.astype(precision.compute), weights.astype(precision.compute)
    return _grouped(x_low, low, sizes, precision.activations), (x_low, weights, sizes)


def _grouped_backward(
    precision: Precision, kept: tuple[Array, Array, Array | None], out_grad: Array
) -> tuple[Array, Array, None]:
    x_low, weights, sizes = kept
    grad_low = out_grad.astype(precision.compute)
    turned = jnp.swapaxes(weights.astype(precision.compute), 1, 2)
    x_grad = _grouped(grad_low, turned, sizes, precision.activations)
    if sizes is None:
        weights_grad = lax.dot_general(
            x_low, grad_low, (((1,), (1,)), ((0,), (0,))), preferred_element_type=precision.reduce
        )
    else:
        rows = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        weights_grad = lax.ragged_dot_general(
            x_low, grad_low, sizes, rows, preferred_element_type=precision.reduce
        )
    return x_grad, weights_grad.astype(weights.dtype), None


grouped_matmul.defvjp(_grouped_forward, _grouped_backward)


def _grouped(x: Array, weights: Array, sizes: Array | None, result: jnp.dtype) -> Array:
    if sizes is not None:
        return lax.ragged_dot(x, weights, sizes, preferred_element_type=result)
    return lax.dot_general(x, weights, (((2,), (1,)), ((0,), (0,))), preferred_element_type=result)
