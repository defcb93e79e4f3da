"""How arrays lie in memory where a product is fast by that alone."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint

from jaxlm.core import backend, processor

Side = Literal[0, 1]  # the axis of a weight that meets the last one of the activations


def is_one_cpu() -> bool:
    """Whether what is traced is for a CPU that is one device."""
    # What is constrained in its layout is not split by jax 0.10's partitioner: it would be gathered.
    return backend.name() == "cpu" and jax.sharding.get_abstract_mesh().size <= 1


def turned(x: Array) -> Array:
    """x[..., M, N] as [..., N, M]; for a product in bfloat16 on one CPU it lies so in memory too.

    XLA for CPU multiplies in bfloat16 only what it contracts along rows of the first factor and down columns of the second as
    they lie in memory; the rest it converts and multiplies in float32. With AMX a transpose costs a third to a sixth of that.
    """
    swapped = jnp.swapaxes(x, -1, -2)
    if x.dtype == jnp.bfloat16 and is_one_cpu():
        return with_layout_constraint(swapped, Layout(tuple(range(x.ndim))))
    return swapped


def for_few_rows(weight: Array, side: Side) -> tuple[Array, Side]:
    """The weight as this CPU multiplies some 8 rows with it fastest, and the side on which they meet it.

    [O, I], side 1, with AMX (in float32 and in bfloat16 two thirds of the time, Intel, jax 0.10.2); else [I, O] (in float32
    two thirds of the time, in bfloat16 the same, AMD, jax 0.10.2 and 0.12).
    """
    best: Side = 1 if processor.AMX in processor.units() else 0
    return (weight if side == best else weight.T), best
