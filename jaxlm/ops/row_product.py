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
FEW_ROWS_OF_INTEL = 32  # of float32, without AMX
MOST_ROWS_OF_AMD = 8  # of bfloat16 and int8, with AVX-512
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

    On a CPU with AVX2 that is [O, I], side 1, see `dot_rows`. Others keep [I, O], unmeasured.
    """
    return 1 if backend.has_vectors() else 0


def decode_layout(weight: Array, side: Side) -> tuple[Array, Side]:
    """Return the weight in the layout of `decode_side`."""
    best = decode_side()
    return (weight if side == best else weight.T), best


def dot_rows(x: Array, weight: Array, side: Side, sums: jnp.dtype) -> Array:
    """Return x[R, I] @ weight[I, O], or weight[O, I] for `side` 1, in the dtype `sums`.

    In a decode pass only of the rows in use, see `of_used_rows`.

    XLA for CPU copies the second factor into tiles in each call. So a weight [O, I] is the first
    one where that is faster, see `_is_weight_first`: on an Intel with AMX in 0.4 to 0.9 of the time
    of [I, O] (2 to 128 rows, 768 to 2,048 inputs, float32, bfloat16 and int8), on other CPUs in 0.2
    to 0.9 in float32. Elsewhere [O, I] after the rows takes 0.4 to 1.2 (jax 0.10 and 0.12).

    One row is duplicated: XLA's loop for one takes seven times as long as two, but for float32.
    """
    return of_used_rows(lambda used: _dot_rows(used, weight, side, sums, len(x)), x)


def _dot_rows(x: Array, weight: Array, side: Side, sums: jnp.dtype, rows: int) -> Array:
    count = len(x)
    is_by_output = side == 1 == decode_side() and is_one_cpu()
    is_first = is_by_output and _is_weight_first(x, weight, rows)
    least = _least_rows(x.dtype, rows, is_by_output, is_first)
    if count < least and is_one_cpu():
        x = jnp.pad(x, ((0, least - count), (0, 0)))
    if is_by_output and len(x) <= FEW_ROWS:
        # XLA would merge transposes of the weight and of the result into the product, and swap the
        # factors.
        weight = lax.optimization_barrier(weight)
        factors = (weight, x) if is_first else (x, weight)
        out = lax.dot_general(*factors, (((1,), (1,)), ((), ())), preferred_element_type=sums)
        out = lax.optimization_barrier(out)
        out = out.T if is_first else out
    else:
        out = lax.dot_general(x, weight, (((1,), (side,)), ((), ())), preferred_element_type=sums)
    return out[:count]


def _is_weight_first(x: Array, weight: Array, rows: int) -> bool:
    """Return whether a weight [O, I] is the first factor of its product with x, of all `rows`.

    On an AMD with AVX-512 a pass of 8 rows takes 0.8 to 0.9 of the time of [I, O] by this rule (jax
    0.12). A weight of more outputs than inputs would take up to 3.5 times as long in int8.
    """
    if backend.AMX in backend.cpu_units():
        return rows <= FEW_ROWS and x.dtype in FIRST
    if not backend.has_wide_vectors():
        is_paid = x.dtype == jnp.float32 or (x.dtype == jnp.int8 and len(x) >= NARROW_INTS)
        return rows <= FEW_ROWS and is_paid
    if backend.is_intel():
        return rows <= FEW_ROWS_OF_INTEL and x.dtype == jnp.float32
    if x.dtype == jnp.float32:
        return rows <= FEW_ROWS
    outputs, inputs = weight.shape
    return rows <= MOST_ROWS_OF_AMD and inputs > outputs


def _least_rows(dtype: jnp.dtype, rows: int, is_by_output: bool, is_first: bool) -> int:
    """Return the fewest rows that have the bits that they have among all `rows`.

    Sums of int8 are exact, and those of 2 to 64 rows of bfloat16 are in one order. The order of
    float32 depends on the rows if the weight is the first factor. It is one for 4 to 16 rows on an
    Intel, for 6 to 8 without AVX-512, and on an AMD with AVX-512 for 6 to 8, 9 to 16 and further
    ranges above (jax 0.10 and 0.12).
    """
    if dtype != jnp.float32:
        return 2
    if not is_by_output:
        return 1
    if not backend.has_wide_vectors():
        return min(8, rows)
    return rows if is_first and not backend.is_intel() else 4  # 4 rows take the time of one
