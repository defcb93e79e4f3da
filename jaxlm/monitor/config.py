"""Settings of what a run writes about itself."""

import dataclasses
from typing import Literal

from jaxlm.core.config import Span, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """How often a step is logged, and where to beside metrics.jsonl, which every run has."""

    every: Span = setting(Span.parse("1%"), "how often the metrics of a step are logged")
    sinks: tuple[Literal["console", "tensorboard"], ...] = setting(
        ("console", "tensorboard"), "who else gets each logged step: console (rows), tensorboard"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """A window of steps whose trace jax.profiler writes into the run's `profile` folder."""

    start: int = setting(10, "completed steps before the trace begins", unit="steps", low=0)
    steps: int = setting(0, "steps to trace; 0 traces none", unit="steps", low=0)
