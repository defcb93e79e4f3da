"""Learning rate as a function of the step."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from jaxlm.optim.config import Constant, Cosine, Schedule


def build(config: Schedule, lr: float, *, total: int, tokens_per_step: int) -> Callable[[Array], Array]:
    """The rate of update `step` (0 for the first), float32.

    While step < w (warm-up): lr (step + 1) / w. After it, with p = (step - w) / (d - w) cut to [0, 1] and the floor f:
    cosine lr (f + (1 - f) (1 + cos(pi p)) / 2); linear lr (1 - (1 - f) p); constant lr.
    """
    warmup = config.warmup.steps(total, tokens_per_step)
    end = total if isinstance(config, Constant) else config.decay.steps(total, tokens_per_step)

    def rate(step: Array) -> Array:
        t = jnp.asarray(step, jnp.float32)
        rising = (t + 1.0) / max(warmup, 1)
        if isinstance(config, Constant):
            falling = jnp.ones_like(t)
        else:
            share = jnp.clip((t - warmup) / max(end - warmup, 1), 0.0, 1.0)
            shape = 0.5 * (1.0 + jnp.cos(jnp.pi * share)) if isinstance(config, Cosine) else 1.0 - share
            falling = config.floor + (1.0 - config.floor) * shape
        return lr * jnp.where(t < warmup, rising, falling)

    return rate
