"""The learning rate as a function of the step.

Example:
    >>> from jaxlm.core.config import Span
    >>> from jaxlm.optim.schedule_config import LinearDecay
    >>> lr = build(LinearDecay(warmup=Span.parse("0")), lr=1.0, total=10, tokens_per_step=1)
    >>> float(lr(5))
    0.5
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxlm.core.span import Paced
from jaxlm.optim.average_config import Average
from jaxlm.optim.schedule_config import Schedule, lr_factor, with_swa_cycles

LearningRate = Callable[[Array | int], Array]


def build(
    config: Schedule,
    *,
    lr: float,
    total: int,
    tokens_per_step: int | Paced,
    average: Average | None = None,
) -> LearningRate:
    """Return the function step -> learning rate of the update that follows `step` completed ones.

    The learning rate is float32.

    Args:
      total, tokens_per_step: steps of the run, and tokens of a step, for spans in tokens.
      average: average of the parameters; swa may have cycles of the learning rate of its own.

    Raises ConfigError if a span is a time, or the parts of the schedule do not fit the run.
    """
    length: dict[str, Any] = {"total": total, "tokens_per_step": tokens_per_step, "xp": jnp}
    factor = with_swa_cycles(average, lr_factor(config, **length), **length)
    return lambda step: lr * factor(jnp.asarray(step, jnp.float32))
