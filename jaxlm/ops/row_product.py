"""The product of rows with a weight, in the order of factors that is fast on a CPU."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxlm.core import backend

Side = Literal[0, 1]  # the axis of a weight that is contracted with the activations
FIRST = (jnp.float32, jnp.bfloat16, jnp.int8)  # dtypes that a weight as first factor pays for
FEW_ROWS = 128  # from 256 rows on the order of the factors does not matter


def is_one_cpu() -> bool:
    """Return whether the traced program is for a single CPU device."""
    # The partitioner of jax 0.10 gathers an array whose layout is constrained.
    return backend.name() == "cpu" and jax.sharding.get_abstract_mesh().size <= 1


def decode_side() -> Side:
    """Return the axis of inputs in the layout that this CPU multiplies a few rows with fastest.

    With AMX that is [O, I], side 1, see `dot_rows`; otherwise [I, O] (two thirds of the time in
    float32, the same in bfloat16, AMD, jax 0.10.2 and 0.12).
    """
    return 1 if backend.AMX in backend.cpu_units() else 0


def decode_layout(weight: Array, side: Side) -> tuple[Array, Side]:
    """Return the weight in the layout of `decode_side`."""
    best = decode_side()
    return (weight if side == best else weight.T), best


def dot_rows(x: Array, weight: Array, side: Side, sums: jnp.dtype) -> Array:
    """Return x[R, I] @ weight[I, O], or weight[O, I] for `side` 1, in the dtype `sums`.

    XLA for CPU copies the second factor into tiles in each call. So a weight [O, I] is the first
    one, if there are few rows: with AMX that takes 0.4 to 0.9 of the time (Intel, jax 0.10 and
    0.12, 2 to 128 rows, 768 to 2,048 inputs, float32, bfloat16 and int8).

    One row is duplicated: XLA's loop for one takes seven times as long as two, but for float32.
    """
    if is_single := len(x) == 1 and x.dtype != jnp.float32 and is_one_cpu():
        x = jnp.broadcast_to(x, (2, *x.shape[1:]))
    if side == 1 and x.dtype in FIRST and _is_weight_first(len(x)):
        # XLA would merge transposes into the product, of the result too: the factors swapped again.
        weight = lax.optimization_barrier(weight)
        out = lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=sums)
        out = lax.optimization_barrier(out).T
    else:
        out = lax.dot_general(x, weight, (((1,), (side,)), ((), ())), preferred_element_type=sums)
    return out[:1] if is_single else out


def _is_weight_first(rows: int) -> bool:
    return 1 < rows <= FEW_ROWS and is_one_cpu() and backend.AMX in backend.cpu_units()
