"""Stochastic rounding, so that updates too small for 16 bits still count in the mean."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxlm.core import random, tree


def add(params: Any, updates: Any) -> Any:
    """Return params + updates in float32, to be changed further and then `rounded`."""
    return jax.tree.map(lambda p, u: widened(p) + u, params, updates)


def widened(x: Array) -> Array:
    """Return x in float32 if it has fewer bits, and unchanged otherwise."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rounded(values: Any, like: Any, key: Array) -> Any:
    """Return a tree with the dtypes of another, rounding stochastically where that drops bits.

    Args:
      values: arrays in float32, or in a dtype that converts to that of `like` without rounding.
      like: a tree of the same structure whose leaves have the target dtypes.
      key: random key; the rounding of a number depends on it, on the leaf's path and on the
        number's position, so it is the same on every mesh and every replica.
    """

    def leaf(path: str, x: Array, old: Array) -> Array:
        if jnp.promote_types(x.dtype, old.dtype) == old.dtype:
            return x.astype(old.dtype)
        return stochastic(x, old.dtype, uniform(random.stream(key, path), x.shape))

    return tree.map_with_path(leaf, values, like)


def stochastic(x: Array, dtype: jnp.dtype, noise: Array) -> Array:
    """Return one of the two numbers of `dtype` around x, at random, with x as the mean.

    Rounding to the nearest drops every update below half the distance to the next number, which
    in bfloat16 is 2^-9 to 2^-8 of the weight itself: 6e-5 for a weight of 0.02. Here such an
    update moves the weight by the whole distance, with the probability that makes up for it.

    Numbers that `dtype` represents exactly, infinities and NaN do not change.

    Args:
      x: float32, of any shape.
      dtype: bfloat16 or float16.
      noise: uniform in [0, 1), of x's shape; multiples of 2^-16 are fine enough for bfloat16.

    Source: Gupta et al. 2015, arXiv:1502.02551, section 3.1; for weights in bfloat16 Zamirai et
    al. 2020, arXiv:2010.06192, section 4.
    """
    near = x.astype(dtype)
    wide = near.astype(x.dtype)
    towards = jnp.where(x > wide, jnp.inf, -jnp.inf).astype(dtype)
    other = jnp.nextafter(near, towards)
    # False for NaN, and if `near` or `other` is infinite.
    return jnp.where(takes_other(x, wide, other.astype(x.dtype), noise), other, near)


def uniform(key: Array, shape: tuple[int, ...]) -> Array:
    """Return multiples of 2^-16 in [0, 1), float32: a hash of `key` and of each number's position.

    A dozen integer operations a number and dimension, which fuse into what follows: a device
    computes the numbers of its own shard, and stores and sends no array of them. `jax.random` gives
    better numbers than rounding needs, but its Threefry is a kernel of its own on GPUs and a loop
    on CPUs, which write 16 bytes a number.

    Source: Wellons 2018, "Prospecting for Hash Functions" (lowbias32, a bijection of 32 bits).
    """
    first, last = jax.random.bits(key, (2,), jnp.uint32)
    mixed = jnp.broadcast_to(first, shape)
    for dim in range(len(shape)):
        mixed = _mix(mixed ^ jax.lax.broadcasted_iota(jnp.uint32, shape, dim))
    return (_mix(mixed ^ last) >> 16).astype(jnp.float32) / 2**16


def _mix(x: Array) -> Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def takes_other(x: Array, one: Array, other: Array, noise: Array) -> Array:
    """Return a mask of the x between `one` and `other` to round to `other`; noise is in [0, 1)."""
    return noise < (x - one) / (other - one)
