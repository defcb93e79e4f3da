"""The learning rate as a function of the step."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from jaxlm.optim.course import course
from jaxlm.optim.schedule_config import Schedule

LearningRate = Callable[[Array | int], Array]


def build(config: Schedule, *, lr: float, total: int, tokens_per_step: int) -> LearningRate:
    """The learning rate of the update that follows `step` completed ones, float32: `lr` times the schedule's course.

    Raises:
      ConfigError: where a span is a time, or the parts of the schedule do not fit the run.
    """
    factor = course(config, total=total, tokens_per_step=tokens_per_step, xp=jnp)
    return lambda step: lr * factor(jnp.asarray(step, jnp.float32))
