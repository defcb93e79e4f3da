"""What a run writes down while it is trained."""

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxlm.core import config
from jaxlm.monitor import sinks, traced, trackers, words
from jaxlm.monitor.console import Console
from jaxlm.monitor.sinks import Sink
from jaxlm.parallel import operations
from jaxlm.recipes import forensics
from jaxlm.recipes.callbacks import Callbacks
from jaxlm.recipes.dropping import Dropping
from jaxlm.recipes.engine import Engine
from jaxlm.recipes.plan import Forecast
from jaxlm.recipes.rewinding import Rewind, Rewinds
from jaxlm.recipes.sample import Written
from jaxlm.train import guard
from jaxlm.train.loop import BudgetSpent
from jaxlm.train.rundir import RunDir

COUNTS = ("skipped_total", "overflows_total")  # metrics that are whole numbers
INNER = ("verdict", "skipped_in_a_row")  # those that are told in other words


class Journal:
    """Records of steps and of evaluations, samples, steps that were not applied, the memory of the step, the summary of a trace.

    Only the process that writes the run directory opens any file, and tells the caller's functions; in the others nothing
    comes of what is recorded. Close it at the end.

    Args:
      warn: is told of a tracker that takes nothing more.
    """

    def __init__(
        self,
        engine: Engine,
        directory: RunDir,
        console: Console,
        rewinds: Rewinds,
        callbacks: Callbacks,
        warn: Callable[[str], None],
    ):
        self._engine, self._directory, self._console = engine, directory, console
        self._rewinds, self._callbacks, self._warn = rewinds, callbacks, warn
        self._dropping = Dropping(console.warn)
        self._held = 0  # bytes of a device, by the largest program
        self._open = contextlib.ExitStack()
        self._metrics: Sink = sinks.Nowhere()
        self._samples: Sink = sinks.Nowhere()
        self._spikes: Sink = sinks.Nowhere()
        self._sinks: list[Sink] = []

    def open(self, through: int) -> None:
        """Opens what is written to, again after a rewind; lines and events of later steps go, as those steps come again."""
        self.close()
        if not self._directory.is_writer:
            return
        path = self._directory.path

        def opened(name: str, keep_through: int | None) -> Sink:
            sink = self._directory.journal(name, keep_through=keep_through)
            return self._open.enter_context(contextlib.closing(sink))

        self._metrics = opened("metrics.jsonl", through)
        self._samples = opened("samples.jsonl", through)
        self._spikes = opened("spikes.jsonl", None)
        others = self._others(path, through)
        for sink in others:
            self._open.callback(sink.close)
        self._sinks = [self._metrics, self._console, *others, self._callbacks]

    def _others(self, path: Path, through: int) -> list[Sink]:
        """TensorBoard and the trackers that the config names."""
        makers: dict[str, Callable[[], Sink]] = {
            "tensorboard": lambda: sinks.TensorBoard(path / "events", keep_through=through),
        }
        settings = config.flatten(self._engine.run)
        for name in trackers.MODULES:
            makers[name] = functools.partial(trackers.open_tracker, name, path, settings)
        return [
            trackers.Guarded(name, makers[name], self._warn)
            for name in self._engine.run.log.sinks
            if name in makers
        ]

    def write(self, step: int, split: str, record: dict[str, Any]) -> None:
        """Hands a line of metrics.jsonl to all that take those."""
        whole = {"step": step, "time_unix": time.time(), "split": split} | record
        for sink in self._sinks:
            sink.write(whole)

    def log(self, step: int, values: dict[str, float], beside: dict[str, Any]) -> None:
        """Writes a logged step: the metrics that came of it, and what was measured `beside` them."""
        record: dict[str, Any] = {
            name: int(value) if name in COUNTS else value
            for name, value in values.items()
            if name not in INNER
        }
        self.write(step, "train", record | beside)
        self._dropping.look(step, values)

    def note_skipped(self, step: int, values: dict[str, float], layers: dict[str, Any]) -> None:
        """Writes down a step that was not applied, with what it had read, and says so.

        One that the loss scale was too large for is said only: it comes of no document, and again whenever the scale grew.
        """
        if values["verdict"] == guard.OVERFLOW:
            self._console.say(
                f"step {step} was not applied: {guard.words(guard.OVERFLOW)}, which is {values['loss_scale']:g} now; "
                f"{int(values['overflows_total'])} such steps so far"
            )
            return
        found = forensics.evidence(self._engine, step, values, layers, self._rewinds.skips)
        self._spikes.write({"time_unix": time.time()} | found)
        self._console.warn(
            f"step {step} was not applied: {found['kind']} (loss {values['loss_nats']:.4g}, gradient "
            f"{values['grad_norm']:.4g}); {int(values['skipped_total'])} skipped so far, see spikes.jsonl",
            step=step,
        )

    def note_rewind(self, spent: BudgetSpent, rewind: Rewind) -> None:
        """Says what could not be got over, and where the run goes back to. The steps there are recorded again once it is `open`."""
        self._console.warn(
            f"rewind {len(self._rewinds.made)} of {self._engine.run.guard.rewinds}: steps {spent.first} to {spent.step} "
            f"could not be applied; going back to step {rewind.to}, leaving out batches {rewind.low} to {rewind.high - 1}",
            step=spent.step,
        )

    def note_ended(self, step: int, source: str) -> None:
        """Says that a source of the mixture has come to its most epochs."""
        self._console.say(
            f"step {step}: {source} has been read as often as data.mixture.epochs lets it; "
            "its weight goes to the others, in proportion to theirs"
        )

    def note_samples(self, step: int, samples: list[Written]) -> None:
        """Writes down what followed the prompts after a step."""
        for each in samples:
            self._samples.write({"step": step, "prompt": each.prompt, "text": each.text})

    def note_memory(self, forecast: Forecast | None, held: dict[str, int]) -> None:
        """Writes what a compiled step holds of a device beside the plan: of several, the one that holds most."""
        if held["total"] <= self._held:
            return
        self._held = held["total"]
        if forecast is not None:
            told = forecast.record() | {"compiled_bytes_per_device": held}
            self._directory.write_json("forecast.json", told)

    def summarise_trace(self, folder: Path, program: jax.stages.Compiled | None) -> None:
        """Says where the time of the traced steps of a program went, and writes it beside the trace."""
        if not self._directory.is_writer:
            return
        known = operations.read(program.as_text() or "") if program else {}

        def tell(name: str) -> tuple[str, str, bool]:
            return (*known.get(name, operations.by_name(name)), name in known)

        try:
            found = traced.summary(traced.newest(folder), tell)
        except ValueError as error:  # a run does not end for it
            self._console.warn(f"the trace has no summary: {error}", step=self._directory.step)
            return
        self._directory.write_json("profile/summary.json", found)
        title = f"trace of {found['steps']} steps, {words.duration(found['seconds'])}, {folder}"
        self._console.block(title, traced.facts(found))

    def flush(self) -> None:
        """Returns when every line so far would survive the death of the machine."""
        for sink in (self._metrics, self._samples, self._spikes):
            sink.flush()

    def close(self) -> None:
        """Closes what is open."""
        self._open.close()
