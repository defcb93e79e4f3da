"""Dropout, of numbers and of whole layers, and noise."""

import math

import jax
import jax.numpy as jnp
from jax import Array

from jaxlm.core import random


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Zeroes a share `rate` of `x` and scales the rest by 1 / (1 - rate); without a key, leaves `x` alone.

    Source: Srivastava et al. 2014, JMLR 15, in the inverted form.
    """
    if rate == 0.0 or key is None:
        return x
    return jnp.where(
        jax.random.bernoulli(key, 1.0 - rate, x.shape), x / (1.0 - rate), jnp.zeros((), x.dtype)
    )


def layer_drop(x: Array, after: Array, rate: Array, key: Array) -> Array:
    """The stream after a layer that each row passes by at the rate: `x`, or x + (after - x) / (1 - rate).

    Source: Huang et al. 2016, arXiv:1603.09382, equation 2, in the inverted form.
    """
    kept = jax.random.bernoulli(key, 1.0 - rate, (x.shape[0], 1, 1))
    scale = (1.0 / (1.0 - rate)).astype(x.dtype)
    return jnp.where(kept, x + (after - x) * scale, x)


def noise(x: Array, alpha: float, key: Array | None) -> Array:
    """Embeddings [B, T, D] with noise, uniform between -+ alpha / sqrt(T D); without a key, `x` alone.

    Source: Jain et al. 2023, arXiv:2310.05914, algorithm 1; T counts the slots of the row, padding too.
    """
    if alpha == 0.0 or key is None:
        return x
    size = alpha / math.sqrt(x.shape[1] * x.shape[2])
    return x + jax.random.uniform(key, x.shape, x.dtype, -size, size)


def noise_key(key: Array | None) -> Array | None:
    """The key of a model's embedding noise, of the one that turns its dropout on."""
    return None if key is None else random.stream(key, "embedding noise")
