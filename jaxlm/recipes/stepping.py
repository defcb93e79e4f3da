"""The compiled step, and now and then a doubt whether the devices still compute."""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.core import faults
from jaxlm.core.errors import Diverged
from jaxlm.monitor import sinks
from jaxlm.monitor.console import Console
from jaxlm.recipes import foresight
from jaxlm.recipes.crew import Crew
from jaxlm.recipes.engine import Engine
from jaxlm.recipes.plan import Forecast
from jaxlm.recipes.watching import Watching
from jaxlm.train.state import TrainState
from jaxlm.train.step import Metrics

AGAIN = "the same command again goes on from the last committed step; a device that does this twice is broken"


class Stepper:
    """The step of a run. It is compiled at the first batch of each stage, where a person can see how long that takes.

    Before it is due by `guard.compare_every` the copies of the parameters on several devices are compared; a step that is
    due by `guard.repeat_every` is computed twice. One whose layers are watched is observed before.

    Args:
      workdir: has the run's earlier records, with the noise of its gradient where layers are watched.
      forecast: the plan of the run; None where there is none.
      compiled: called with the step once it is compiled, before it first runs.
      pause: the time in there is none of the steps'.
    """

    def __init__(
        self,
        engine: Engine,
        crew: Crew,
        console: Console,
        workdir: Path,
        forecast: Forecast | None,
        compiled: Callable[[jax.stages.Compiled], object],
        pause: Callable[[], contextlib.AbstractContextManager[object]],
    ):
        self._engine, self._crew, self._console, self._then = engine, crew, console, compiled
        self._workdir, self._forecast, self._pause = workdir, forecast, pause
        self.watching: Watching | None = None
        self._steps: dict[tuple[int, ...], jax.stages.Compiled] = {}
        self._observers: dict[tuple[int, ...], jax.stages.Compiled] = {}
        self.completed = 0  # steps before the one that comes next
        self._rate, self._placed = 1.0, engine.rate(1.0)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One step. Raises Diverged where devices disagree."""
        rows, length = shape = batch.tokens.shape
        if shape not in self._steps:
            if self._steps:  # a pause begins when no step is under way
                jax.block_until_ready(state)
            of = f" for {rows} rows x {length} tokens" if len(self._engine.pace.stages) > 1 else ""
            with (
                self._pause(),
                self._crew.watch.phase("compile"),
                self._console.timer(f"compiling the step{of}"),
            ):
                faults.point("compile")
                self._steps[shape] = self._engine.step.lower(state, batch, self._placed).compile()
            if self._engine.run.log.layers:
                with (
                    self._pause(),
                    self._crew.watch.phase("compile"),
                    self._console.timer(f"compiling what watches the layers{of}"),
                ):
                    program = self._engine.observe.lower(state, batch, self._placed).compile()
                self._observers[shape] = program
                self._watch(program)
            self._then(self._steps[shape])
        step = self._steps[shape]
        limits, number = self._engine.run.guard, self.completed + 1
        if self.watching is not None:
            observe = functools.partial(self._observers[shape], state, batch, self._placed)
            self.watching.look(observe, number)
        if limits.compare_every and number % limits.compare_every == 0:
            self._compare(state)
        if limits.repeat_every and number % limits.repeat_every == 0:
            return self._repeated(step, state, batch)
        return step(state, batch, self._placed)

    def follow(self, rate: float) -> None:
        """From the next step on, the learning rate is the schedule's times `rate`."""
        if rate != self._rate:
            self._rate, self._placed = rate, self._engine.rate(rate)

    def _watch(self, program: jax.stages.Compiled) -> None:
        """Begins to watch the layers by a program that fits the device, or goes on to."""
        run, mesh = self._engine.run, self._engine.model.mesh
        foresight.check(run, self._forecast, compiled_memory(program)["total"])
        if self.watching is None:
            before = sinks.read(self._workdir / "metrics.jsonl")
            self.watching = Watching(run, dict(mesh.shape), before)

    def _compare(self, state: TrainState) -> None:
        if differences := self._engine.replicas.differences(state.params):
            raise Diverged(
                f"copies of the parameters differ between devices, in {len(differences)} leaves",
                where=f"before step {self.completed + 1}",
                why="\n".join(differences[:4]),
                fix=AGAIN,
            )

    def _repeated(
        self, step: jax.stages.Compiled, state: TrainState, batch: Any
    ) -> tuple[TrainState, Metrics]:
        """One step computed twice from the same state: a processor that miscalculates now and then leaves no other trace."""
        again, _ = step(jax.tree.map(jnp.copy, state), batch, self._placed)
        moved, metrics = step(state, batch, self._placed)
        if differences := self._engine.replicas.changes(again.params, moved.params):
            raise Diverged(
                f"step {self.completed + 1} came out otherwise when it was computed again, in {len(differences)} leaves",
                where=f"step {self.completed + 1}",
                why="\n".join(differences[:4]),
                fix=AGAIN,
            )
        return moved, metrics


def compiled_memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """The compiler's account of a device's memory."""
    memory: Any = compiled.memory_analysis()
    parts = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
    }
    return parts | {"total": sum(parts.values())}
