"""Averages of the parameters: exponential moving average (EMA), stochastic weight averaging."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxlm.core.span import Paced
from jaxlm.optim.average_config import Average, NoAverage, Swa

AverageUpdate = Callable[[Any, Any, Array], Any]


def init(params: Any) -> Any:
    """Return the average before the first update: a copy of the parameters in float32.

    A lower precision would lose the small steps of the average towards the parameters.
    """
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)


def build(config: Average, *, total: int, tokens_per_step: int | Paced) -> AverageUpdate | None:
    """Return the function (average, parameters, updates) -> next average; None for no average.

    `updates` is the number of updates that were applied. With n the updates since `begin`, the
    average a becomes a + w (p - a), with w

        ema   1 - min(decay, (1 + n) / (10 + n))
        swa   1 / k if n = k every, else 0

    The average is p itself for n < 1; with swa for n <= every. It needs no state but the number of
    updates.

    Source: Polyak and Juditsky 1992 (averaging of iterates); TensorFlow's
    `ExponentialMovingAverage` (the limit while n is small); Izmailov et al. 2018, arXiv:1803.05407,
    algorithm 1 (swa).
    """
    if isinstance(config, NoAverage):
        return None
    begin = config.begin.steps(total, tokens_per_step)
    every = config.every.steps(total, tokens_per_step) if isinstance(config, Swa) else 1

    def update(average: Any, params: Any, updates: Array) -> Any:
        n = updates - begin
        count = n.astype(jnp.float32)
        if isinstance(config, Swa):
            weight = jnp.where(n % every == 0, every / jnp.maximum(count, 1), 0.0)
            weight = jnp.where(n <= every, 1.0, weight)
        else:
            decay = jnp.minimum(config.decay, (1 + count) / (10 + count))
            weight = jnp.where(n < 1, 1.0, 1 - decay)

        def leaf(a: Array, p: Array) -> Array:
            p = p.astype(a.dtype)
            return jnp.where(weight == 1, p, a + weight * (p - a))

        return jax.tree.map(leaf, average, params)

    return update
