"""Settings of what a run writes about itself."""

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
    """How often a step is logged, and where to beside metrics.jsonl, which every run has."""

    every: Span = setting(Span.parse("1%"), "how often the metrics of a step are logged")
    sinks: tuple[SinkName, ...] = setting(
        ("console", "tensorboard"),
        "who else gets each logged step: console (rows), tensorboard; wandb (offline), trackio, mlflow, in the run's folder",
    )
    layers: tuple[Watched, ...] = setting(
        (),
        "figures of every layer in a logged step: norms (gradient, parameter, update), activations (their size, dead units, load of experts), attention (entropy, largest logit); and noise (of the gradient, against the batch)",
    )
    layers_every: Span = setting(
        Span.parse(100),
        "how often, at the next logged step; each time costs about one more step",
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Before a step that is watched, it must be known that it is."""
        for name, span in (("every", self.every), ("layers_every", self.layers_every)):
            if self.layers and span.unit == "second":
                yield (
                    name,
                    f"layers are watched at steps that are known before, not at a time, {span}",
                    f"--config.log.{name}=1%",
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """A window of steps whose trace jax.profiler writes into the run's `profile` folder, with a summary."""

    steps: str | None = setting(
        None, "FIRST:LAST, completed steps at which the trace begins and ends; None traces none"
    )

    @property
    def window(self) -> range:
        """The numbers of completed steps before which a step is traced."""
        found = WINDOW.fullmatch(self.steps or "")
        return range(*map(int, found.groups())) if found else range(0)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """A window has two ends and a step between them."""
        if self.steps is not None and not self.window:
            yield (
                "steps",
                f"{self.steps!r} is no window FIRST:LAST of completed steps",
                "jaxlm config explain profile.steps",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """How long the run may stand still, by what it is doing, before it ends with exit code 76."""

    start: Span = setting(Span.parse("30m"), "how long building the model may take")
    prepare: Span = setting(
        Span.parse("12h"), "how long training a tokenizer, tokenising and packing may take"
    )
    compile: Span = setting(
        Span.parse("30m"), "how long compiling may take, and each of the first steps"
    )
    step: Span = setting(Span.parse("60s"), "how long a step may take at least")
    factor: float = setting(10.0, "a step may take this many times the median", above=1.0)
    data: Span = setting(Span.parse("20m"), "how long the wait for a batch may take")
    eval: Span = setting(Span.parse("60m"), "how long an evaluation may take, samples too")
    save: Span = setting(
        Span.parse("20m"),
        "how long a save may take, from the copy to the commit: writing, and hashing what was written; and a restore",
    )
    verify: Span = setting(
        Span.parse("20m"),
        "how long hashing a checkpoint before a restore or a rewind may go without a byte read, by any process",
    )
    finish: Span = setting(
        Span.parse("20m"), "how long the report and the wait for other processes may take"
    )
    join: Span = setting(
        Span.parse("5m"), "how long the first process waits for the others to start"
    )
    heartbeat: Span = setting(
        Span.parse("100s"), "a process that has been silent this long is lost"
    )

    def limits(self) -> dict[str, float]:
        """Seconds by phase."""
        return {
            field.name: value.amount
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Span)
        }

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """A limit is a time."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Span) and (value.unit != "second" or value.amount <= 0):
                yield (
                    field.name,
                    f"a limit is a time, not {value}",
                    f"jaxlm config explain watch.{field.name}",
                )
