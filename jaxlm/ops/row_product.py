"""The product of rows with a weight, in the order of factors that is fast on a CPU."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxlm.core import backend

Side = Literal[0, 1]  # the axis of a weight that is contracted with the activations
FIRST = (jnp.float32, jnp.bfloat16, jnp.int8)  # dtypes that a weight as first factor pays for
FEW_ROWS = 128  # from 256 rows on the order of the factors does not matter
FEW_ROWS_WITHOUT_AMX = 32  # of float32, with AVX-512
NARROW_INTS = 8  # fewest rows of int8 that a weight as first factor pays for without AVX-512


class DecodeRows(NamedTuple):
    """Rows of a decode pass, and how many of them, the first ones, its products compute."""

    used: int
    total: int


# A `DecodeRows` while a decode pass is traced. JAX traces a function again for another one.
decode_rows = jax.make_user_context(None)


def of_used_rows(product: Callable[[Array], Array], x: Array) -> Array:
    """Return product(x) of the rows that `decode_rows` uses, and zeros for the others.

    The time of a product with a weight, and of one with a KV cache, grows with its rows. All else
    is computed for all rows, between barriers: a sum over a row has other bits among other rows.

    Args:
      product: keeps the leading axis of its argument.
      x: has the tokens of all rows on its leading axis, those of a row adjacent.
    """
    rows: DecodeRows | None = decode_rows.value
    if rows is None or len(x) % rows.total:
        return product(x)
    used = len(x) // rows.total * rows.used
    out = product(lax.optimization_barrier(x)[:used])
    out = jnp.pad(out, ((0, len(x) - used), *((0, 0),) * (out.ndim - 1)))
    return lax.optimization_barrier(out)


def is_one_cpu() -> bool:
    """Return whether the traced program is for a single CPU device."""
    # The partitioner of jax 0.10 gathers an array whose layout is constrained.
    return backend.name() == "cpu" and jax.sharding.get_abstract_mesh().size <= 1


def decode_side() -> Side:
    """Return the axis of inputs in the layout that this CPU multiplies a few rows with fastest.

    On an Intel, and on a CPU with AVX2 without AVX-512, that is [O, I], side 1, see `dot_rows`. On
    other CPUs it is [I, O]: on an AMD with AVX-512 two thirds of the time of [O, I] after the rows
    in float32, the same in bfloat16 (jax 0.10.2 and 0.12).
    """
    return 1 if backend.is_intel() or backend.has_narrow_vectors() else 0


def decode_layout(weight: Array, side: Side) -> tuple[Array, Side]:
    """Return the weight in the layout of `decode_side`."""
    best = decode_side()
    return (weight if side == best else weight.T), best


def dot_rows(x: Array, weight: Array, side: Side, sums: jnp.dtype) -> Array:
    """Return x[R, I] @ weight[I, O], or weight[O, I] for `side` 1, in the dtype `sums`.

    In a decode pass only of the rows in use, see `of_used_rows`.

    XLA for CPU copies the second factor into tiles in each call. So a weight [O, I] is the first
    one, if there are few rows. On an Intel with AMX that takes 0.4 to 0.9 of the time of [I, O] (2
    to 128 rows, 768 to 2,048 inputs, float32, bfloat16 and int8). On other CPUs it takes 0.2 to 0.9
    in float32, up to 32 rows with AVX-512 and 128 without, and [O, I] after the rows takes 0.4 to
    1.0 in int8 and bfloat16 (jax 0.10 and 0.12). With AVX2 alone eight rows of int8 are the second
    factor too.

    One row is duplicated: XLA's loop for one takes seven times as long as two, but for float32.
    """
    return of_used_rows(lambda used: _dot_rows(used, weight, side, sums, len(x)), x)


def _dot_rows(x: Array, weight: Array, side: Side, sums: jnp.dtype, rows: int) -> Array:
    count = len(x)
    is_by_output = side == 1 == decode_side() and is_one_cpu()
    least = _least_rows(rows, is_by_output) if x.dtype == jnp.float32 else 2
    if count < least and is_one_cpu():
        x = jnp.pad(x, ((0, least - count), (0, 0)))
    if is_by_output and len(x) <= FEW_ROWS:
        # XLA would merge transposes of the weight and of the result into the product, and swap the
        # factors.
        weight = lax.optimization_barrier(weight)
        factors = (weight, x) if (is_first := _is_weight_first(x)) else (x, weight)
        out = lax.dot_general(*factors, (((1,), (1,)), ((), ())), preferred_element_type=sums)
        out = lax.optimization_barrier(out)
        out = out.T if is_first else out
    else:
        out = lax.dot_general(x, weight, (((1,), (side,)), ((), ())), preferred_element_type=sums)
    return out[:count]


def _least_rows(rows: int, is_by_output: bool) -> int:
    """Return the fewest rows of float32 that have the bits that they have among all `rows`.

    As the second factor 2 rows have other bits than 4 to 16, whose sums are in one order; without
    AVX-512 those of 2 to 5 rows are in one, and those of 6 to 8. In bfloat16 and int8 those of 2 to
    64 rows are (jax 0.10 and 0.12).
    """
    if not is_by_output:
        return 1
    return min(8, rows) if backend.has_narrow_vectors() else 4  # 4 rows take the time of one


def _is_weight_first(x: Array) -> bool:
    if backend.AMX in backend.cpu_units():
        return x.dtype in FIRST
    if backend.has_narrow_vectors():
        return x.dtype == jnp.float32 or (x.dtype == jnp.int8 and len(x) >= NARROW_INTS)
    return x.dtype == jnp.float32 and len(x) <= FEW_ROWS_WITHOUT_AMX
