"""Dropout of activations and of whole layers, and embedding noise."""

import contextlib
import contextvars
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array

from jaxlm.core import random

_LAYER_KEY: contextvars.ContextVar[Array | None] = contextvars.ContextVar("layer", default=None)


@contextlib.contextmanager
def with_layer_key(key: Array | None) -> Iterator[None]:
    """Set the key that `layer_key` returns while a layer is traced."""
    token = _LAYER_KEY.set(key)
    try:
        yield
    finally:
        _LAYER_KEY.reset(token)


def layer_key() -> Array | None:
    """Return the dropout key of the layer that is traced, for an adapter inside; else None."""
    return _LAYER_KEY.get()


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Zero a share `rate` of `x` and scale the rest by 1 / (1 - rate); identity without a key.

    Source: Srivastava et al. 2014, JMLR 15, in the inverted form.
    """
    if rate == 0.0 or key is None:
        return x
    mask = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(mask, x / (1.0 - rate), jnp.zeros((), x.dtype))


def layer_drop(x: Array, after: Array, rate: Array, key: Array) -> Array:
    """Stochastic depth: for each row `x` at the rate, else x + (after - x) / (1 - rate).

    Source: Huang et al. 2016, arXiv:1603.09382, equation 2, in the inverted form.
    """
    is_run = jax.random.bernoulli(key, 1.0 - rate, (x.shape[0], 1, 1))
    scale = (1.0 / (1.0 - rate)).astype(x.dtype)
    return jnp.where(is_run, x + (after - x) * scale, x)


def noise(x: Array, alpha: float, key: Array | None) -> Array:
    """NEFTune: add uniform noise within alpha / sqrt(T D) to x [B, T, D]; identity without a key.

    Source: Jain et al. 2023, arXiv:2310.05914, algorithm 1; T counts the slots of the row,
    padding included.
    """
    if alpha == 0.0 or key is None:
        return x
    size = alpha / math.sqrt(x.shape[1] * x.shape[2])
    return x + jax.random.uniform(key, x.shape, x.dtype, -size, size)


def noise_key(key: Array | None) -> Array | None:
    """Return the key of the embedding noise, derived from the model's dropout key."""
    return None if key is None else random.stream(key, "embedding noise")
