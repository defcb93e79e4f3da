"""Dropout."""

import jax
import jax.numpy as jnp
from jax import Array


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Zeroes a share `rate` of `x` and scales the rest by 1 / (1 - rate); without a key, leaves `x` alone.

    Source: Srivastava et al. 2014, JMLR 15, in the inverted form.
    """
    if rate == 0.0 or key is None:
        return x
    return jnp.where(
        jax.random.bernoulli(key, 1.0 - rate, x.shape), x / (1.0 - rate), jnp.zeros((), x.dtype)
    )
