"""The product of rows with a weight, in the order of factors that is fast on a CPU."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxlm.core import backend

Side = Literal[0, 1]  # the axis of a weight that is contracted with the activations
FIRST = (jnp.float32, jnp.bfloat16, jnp.int8)  # dtypes that a weight as first factor pays for
FEW_ROWS = 128  # from 256 rows on the order of the factors does not matter
FEW_ROWS_WITHOUT_AMX = 32  # only in float32


def is_one_cpu() -> bool:
    """Return whether the traced program is for a single CPU device."""
    # The partitioner of jax 0.10 gathers an array whose layout is constrained.
    return backend.name() == "cpu" and jax.sharding.get_abstract_mesh().size <= 1


def decode_side() -> Side:
    """Return the axis of inputs in the layout that this CPU multiplies a few rows with fastest.

    On an Intel that is [O, I], side 1, see `dot_rows`. On an AMD it is [I, O]: two thirds of the
    time of [O, I] after the rows in float32, the same in bfloat16 (jax 0.10.2 and 0.12).
    """
    return 1 if backend.is_intel() else 0


def decode_layout(weight: Array, side: Side) -> tuple[Array, Side]:
    """Return the weight in the layout of `decode_side`."""
    best = decode_side()
    return (weight if side == best else weight.T), best


def dot_rows(x: Array, weight: Array, side: Side, sums: jnp.dtype) -> Array:
    """Return x[R, I] @ weight[I, O], or weight[O, I] for `side` 1, in the dtype `sums`.

    XLA for CPU copies the second factor into tiles in each call. So a weight [O, I] is the first
    one, if there are few rows. On an Intel with AMX that takes 0.4 to 0.9 of the time of [I, O] (2
    to 128 rows, 768 to 2,048 inputs, float32, bfloat16 and int8). On one without AMX it takes 0.4
    to 0.8 in float32, up to 32 rows, and [O, I] after the rows takes 0.4 to 0.9 in int8 and
    bfloat16 (jax 0.10 and 0.12).

    One row is duplicated: XLA's loop for one takes seven times as long as two, but for float32.
    """
    if is_single := len(x) == 1 and x.dtype != jnp.float32 and is_one_cpu():
        x = jnp.broadcast_to(x, (2, *x.shape[1:]))
    if side == 1 and 1 < len(x) <= FEW_ROWS and is_one_cpu() and backend.is_intel():
        # XLA would merge transposes of the weight and of the result into the product, and swap the
        # factors.
        weight = lax.optimization_barrier(weight)
        factors = (weight, x) if (is_first := _is_weight_first(x)) else (x, weight)
        out = lax.dot_general(*factors, (((1,), (1,)), ((), ())), preferred_element_type=sums)
        out = lax.optimization_barrier(out)
        out = out.T if is_first else out
    else:
        out = lax.dot_general(x, weight, (((1,), (side,)), ((), ())), preferred_element_type=sums)
    return out[:1] if is_single else out


def _is_weight_first(x: Array) -> bool:
    if backend.AMX in backend.cpu_units():
        return x.dtype in FIRST
    return x.dtype == jnp.float32 and len(x) <= FEW_ROWS_WITHOUT_AMX
