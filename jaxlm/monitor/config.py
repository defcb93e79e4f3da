"""Settings of logging, profiling and the watchdog."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Literal

from jaxlm.core.config import Span, setting

SinkName = Literal["console", "tensorboard", "wandb", "trackio", "mlflow"]
WINDOW = re.compile(r"(\d{1,9}):(\d{1,9})", re.ASCII)
Watched = Literal["norms", "activations", "attention", "noise"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Interval and destinations of logged steps; every run writes metrics.jsonl."""

    every: Span = setting(Span.parse("1%"), "interval between logged steps")
    sinks: tuple[SinkName, ...] = setting(
        ("console", "tensorboard"),
        "destinations of logged steps besides metrics.jsonl: console, tensorboard, wandb "
        "(offline), trackio, mlflow, in the run's folder",
    )
    layers: tuple[Watched, ...] = setting(
        (),
        "figures of every layer at a logged step: norms (gradient, parameter, update), activations "
        "(RMS, dead units, expert load), attention (entropy, largest logit); and noise (gradient "
        "noise scale)",
    )
    layers_every: Span = setting(
        Span.parse(100),
        "interval between layer figures, at the next logged step; each costs about one more step",
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield intervals in seconds: steps with layer figures must be known in advance."""
        for name, span in (("every", self.every), ("layers_every", self.layers_every)):
            if self.layers and span.unit == "second":
                why = f"log.layers needs an interval in steps, tokens or percent, not {span}"
                yield name, why, f"--config.log.{name}=1%"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Window of steps that jax.profiler traces into the run's `profile` folder, with a summary."""

    steps: str | None = setting(
        None, "FIRST:LAST, completed steps at which the trace begins and ends; None disables it"
    )

    @property
    def window(self) -> range:
        """Return the numbers of completed steps before which a step is traced."""
        match = WINDOW.fullmatch(self.steps or "")
        return range(*map(int, match.groups())) if match else range(0)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield a window that is malformed or empty."""
        if self.steps is not None and not self.window:
            why = f"{self.steps!r} is not a window FIRST:LAST of completed steps"
            yield "steps", why, "jaxlm config explain profile.steps"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Watchdog limits by phase: a run that exceeds one ends with exit code 76."""

    start: Span = setting(Span.parse("30m"), "limit for building the model")
    prepare: Span = setting(
        Span.parse("12h"), "limit for training a tokenizer, tokenizing and packing"
    )
    compile: Span = setting(
        Span.parse("30m"), "limit for compiling, and for each of the first steps"
    )
    step: Span = setting(Span.parse("60s"), "lower bound of the limit for a step")
    factor: float = setting(10.0, "limit for a step as a multiple of the median step", above=1.0)
    data: Span = setting(Span.parse("20m"), "limit for the wait for a batch")
    eval: Span = setting(Span.parse("60m"), "limit for an evaluation, samples included")
    save: Span = setting(
        Span.parse("20m"),
        "limit for a save from the copy to the commit, hashing included, and for a restore",
    )
    verify: Span = setting(
        Span.parse("20m"),
        "limit without a byte read, by any process, while a checkpoint is hashed before a restore "
        "or rewind",
    )
    finish: Span = setting(
        Span.parse("20m"), "limit for the report and the wait for other processes"
    )
    join: Span = setting(
        Span.parse("5m"), "limit for the wait of the first process for the others to start"
    )
    heartbeat: Span = setting(Span.parse("100s"), "silence after which a process counts as lost")

    def limits(self) -> dict[str, float]:
        """Return the limits in seconds, by phase."""
        return {name: span.amount for name, span in vars(self).items() if isinstance(span, Span)}

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield limits that are not a time above 0."""
        for name, span in vars(self).items():
            if isinstance(span, Span) and (span.unit != "second" or span.amount <= 0):
                why = f"a limit must be a time above 0, not {span}"
                yield name, why, f"jaxlm config explain watch.{name}"
