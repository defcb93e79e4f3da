"""The learning rate as a function of the step."""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from jaxlm.core.config import Span
from jaxlm.core.errors import ConfigError
from jaxlm.optim.config import Constant, Cosine, Schedule

LearningRate = Callable[[Array | int], Array]


def build(config: Schedule, *, lr: float, total: int, tokens_per_step: int) -> LearningRate:
    """The learning rate of the update that follows `step` completed ones, float32, peak `lr`.

    With warm-up W, end E, floor f and s = clip((step - W) / (E - W), 0, 1):

        step < W    lr (step + 1) / (W + 1)
        constant    lr
        linear      lr (1 + (f - 1) s)
        cosine      lr (f + (1 - f) (1 + cos(pi s)) / 2)

    The first update is not zero, and step W is the first at the peak. This is nanoGPT's `get_lr` with
    `min_lr = f lr`.

    Raises:
      ConfigError: where a span is a time, or the warm-up is not over before the end.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5, without restarts.
    """
    warmup = _steps(config.warmup, "warmup", total, tokens_per_step)
    end = (
        total if isinstance(config, Constant) else _steps(config.end, "end", total, tokens_per_step)
    )
    if not isinstance(config, Constant) and warmup >= end:
        raise ConfigError(
            "the warm-up is not over when the schedule ends",
            where="schedule.warmup, schedule.end",
            why=f"warm-up of {warmup} steps, end at step {end}, {total} steps in all",
            fix="--config.schedule.warmup=2%",
        )

    def at(step: Array | int) -> Array:
        now = jnp.asarray(step, jnp.float32)
        rising = (now + 1) / (warmup + 1)
        if isinstance(config, Constant):
            return lr * jnp.minimum(rising, 1.0)
        share = jnp.clip((now - warmup) / (end - warmup), 0.0, 1.0)
        if isinstance(config, Cosine):
            share = 0.5 * (1 - jnp.cos(math.pi * share))
        return lr * jnp.where(now < warmup, rising, 1 + (config.floor - 1) * share)

    return at


def _steps(span: Span, field: str, total: int, tokens_per_step: int) -> int:
    try:
        return span.steps(total, tokens_per_step)
    except ValueError as error:
        raise ConfigError(
            "a schedule cannot be a time",
            where=f"schedule.{field}",
            why=str(error),
            fix=f"--config.schedule.{field}=2%",
        ) from error
