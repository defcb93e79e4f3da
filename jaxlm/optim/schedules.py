"""The learning rate as a function of the step."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxlm.core.span import Paced
from jaxlm.optim.average_config import Average
from jaxlm.optim.schedule_config import Schedule
from jaxlm.optim.schedule_functions import averaged, course

LearningRate = Callable[[Array | int], Array]


def build(
    config: Schedule,
    *,
    lr: float,
    total: int,
    tokens_per_step: int | Paced,
    average: Average | None = None,
) -> LearningRate:
    """The learning rate of the update that follows `step` completed ones, float32: `lr` times the schedule's course.

    An `average` may have a course of its own, from where it begins.

    Raises:
      ConfigError: where a span is a time, or the parts of the schedule do not fit the run.
    """
    length: dict[str, Any] = {"total": total, "tokens_per_step": tokens_per_step, "xp": jnp}
    factor = averaged(average, course(config, **length), **length)
    return lambda step: lr * factor(jnp.asarray(step, jnp.float32))
