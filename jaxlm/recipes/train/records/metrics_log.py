"""Records of a run: metrics, samples, spikes and rollouts, in files, console and trackers."""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxlm.core import config
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import DataError
from jaxlm.generate.sampler import Continuation
from jaxlm.monitor import formatting, profiling, sinks, trackers
from jaxlm.monitor.sinks import Jsonl, Sink
from jaxlm.monitor.tensorboard import TensorBoard
from jaxlm.parallel import hlo
from jaxlm.recipes.plan.predict import Forecast
from jaxlm.recipes.train.api import RunContext
from jaxlm.recipes.train.checkpointing import Rewind
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.recipes.train.records.metric_warnings import (
    DroppedTokenWarning,
    HeldOutRewardWarning,
    RedrawnSampleWarning,
    UnlikelierAnswerWarning,
)
from jaxlm.recipes.train.records.spikes import skip_notice, spike_evidence
from jaxlm.training import guard
from jaxlm.training.loop import BudgetSpent

COUNTS = ("skipped_total", "overflows_total")  # metrics that are whole numbers
# Metrics that are recorded in other forms.
INTERNAL = ("verdict", "skipped_in_a_row", "tokens_read")
ROLLOUTS = "rollouts.jsonl"  # every sample that was drawn to train on


class MetricsLogger:
    """Writes the records of a run to its files, the console, the trackers and the callbacks.

    Only the process that writes the run directory opens files and calls functions; in the others
    nothing is written. Close it at the end. `warn` gets a message if a tracker accepts no more
    records.
    """

    def __init__(self, context: RunContext, programs: TrainPrograms, warn: Log):
        self._context, self._programs, self._warn = context, programs, warn
        self._directory, self._console = context.directory, context.console
        self._dropped_tokens = DroppedTokenWarning(self._console.warn)
        self._chosen = UnlikelierAnswerWarning(self._console.warn, [])
        self._held_out: HeldOutRewardWarning | None = None  # of runs with rollouts alone
        self._program_bytes = 0  # on a device, of the largest program
        self._open = contextlib.ExitStack()
        self._metrics: Sink = sinks.NullSink()
        self._samples: Sink = sinks.NullSink()
        self._spikes: Sink = sinks.NullSink()
        self._rollouts: Jsonl | None = None
        self._redrawn: RedrawnSampleWarning | None = None
        self._sinks: list[Sink] = []
        self._text_sinks: list[trackers.GuardedSink] = []

    def open(self, through: int) -> None:
        """Open the files, again after a rewind; records of steps after `through` are removed."""
        self.close()
        if not self._directory.is_writer:
            return

        def opened(name: str, keep_through: int | None) -> Jsonl:
            sink = self._directory.journal(name, keep_through=keep_through)
            return self._open.enter_context(contextlib.closing(sink))

        self._metrics = opened("metrics.jsonl", through)
        known: list[dict[str, Any]] = []
        with contextlib.suppress(DataError):  # the report names a damaged line
            known = sinks.read(self._directory.path / "metrics.jsonl")
            self._console.remember(known)
            self._chosen = UnlikelierAnswerWarning(self._console.warn, known)
        self._samples = opened("samples.jsonl", through)
        self._spikes = opened("spikes.jsonl", None)
        if self._context.run.objective.samples_answers:
            self._rollouts = opened(ROLLOUTS, through)
            dropped = () if self._redrawn else self._rollouts.dropped  # a rewind has other batches
            self._redrawn = RedrawnSampleWarning(self._console.warn, dropped)
            self._held_out = HeldOutRewardWarning(self._console.warn, known)
        others = [self._open.enter_context(contextlib.closing(s)) for s in self._trackers(through)]
        self._text_sinks = others
        self._sinks = [self._metrics, self._console, *others, self._context.callbacks]

    def _trackers(self, through: int) -> list[trackers.GuardedSink]:
        """Return TensorBoard and the trackers that the config names."""
        path = self._directory.path
        settings = config.flatten(self._context.run)

        def open_tensorboard() -> Sink:
            sink = TensorBoard(path / "events", keep_through=through)
            defaults = config.flatten(type(self._context.run)())
            others = {k: v for k, v in settings.items() if v != defaults.get(k)}
            sink.describe(others, [*self._programs.data.validation] or ["train"])
            return sink

        makers: dict[str, Callable[[], Sink]] = {"tensorboard": open_tensorboard}
        for name in trackers.MODULES:
            makers[name] = functools.partial(trackers.open_tracker, name, path, settings)
        return [
            trackers.GuardedSink(name, makers[name], self._warn)
            for name in self._context.run.log.sinks
            if name in makers
        ]

    def write(self, step: int, split: str, record: dict[str, Any]) -> dict[str, Any]:
        """Write a record of metrics.jsonl to all sinks, and return it."""
        record = {"step": step, "time_unix": time.time(), "split": split} | record
        for sink in self._sinks:
            sink.write(record)
        if self._held_out is not None:
            self._held_out.check(record)
        return record

    def log(self, step: int, values: dict[str, float], measured: dict[str, Any]) -> dict[str, Any]:
        """Write and return a logged step: its metrics, and figures that the host measured."""
        record: dict[str, Any] = {
            name: int(value) if name in COUNTS else value
            for name, value in values.items()
            if name not in INTERNAL and (name, value) != ("trained_share", 1.0)
        }
        written = self.write(step, "train", record | measured)
        self._dropped_tokens.check(step, values)
        self._chosen.check(step, values)
        return written

    def note_skipped(self, step: int, values: dict[str, float], layers: dict[str, Any]) -> None:
        """Record a step that was not applied, with the documents of its batch, and print it.

        After the first steps only some are printed; spikes.jsonl has all.

        A step that overflowed because of the loss scale is only printed: no document causes it, and
        it recurs whenever the scale has grown.
        """
        if values["verdict"] == guard.OVERFLOW:
            self._console.say(
                f"step {step} was not applied: {guard.describe_verdict(guard.OVERFLOW)}, which is"
                f" {values['loss_scale']:g} now; {int(values['overflows_total'])} such steps so far"
            )
            return
        evidence = spike_evidence(self._programs, step, values, layers, self._context.rewinds.skips)
        self._spikes.write({"time_unix": time.time()} | evidence)
        if notice := skip_notice(step, evidence["kind"], values):
            self._console.warn(notice, step=step)

    def note_rewind(self, spent: BudgetSpent, rewind: Rewind) -> None:
        """Print the steps that could not be applied, and the step that the run returns to."""
        count, most = len(self._context.rewinds.made), self._context.run.guard.rewinds
        self._console.warn(
            f"rewind {count} of {most}: steps {spent.first} to {spent.step} could not be applied;"
            f" returning to step {rewind.to}, without batches {rewind.low} to {rewind.high - 1}",
            step=spent.step,
        )

    def note_exhausted(self, step: int, source: str) -> None:
        """Print that a source of the mixture has reached its most epochs."""
        self._console.say(
            f"step {step}: {source} has reached data.mixture.epochs; its weight is distributed"
            " over the other sources in proportion to theirs"
        )

    def note_samples(self, step: int, samples: list[Continuation]) -> None:
        """Write the continuations of the prompts after a step."""
        for each in samples:
            sample = {"step": step, "prompt": each.prompt, "text": each.text}
            if each.log_probabilities is not None:
                table = self._programs.data.tokenizer.table
                texts = (table[number].decode("utf-8", "replace") for number in each.ids)
                scored = zip(texts, each.log_probabilities, strict=True)
                sample["tokens"] = [[text, round(-score, 3)] for text, score in scored]
            self._samples.write(sample)
            for tracker in self._text_sinks:
                tracker.sample(step, each.prompt, each.text)

    def note_rollout(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the samples of the rollout that is drawn for a step."""
        if self._rollouts is None or self._redrawn is None:
            return
        self._rollouts.write_all({"step": step, **each} for each in records)
        self._redrawn.check(step, records)

    def note_memory(self, forecast: Forecast | None, compiled: dict[str, int]) -> None:
        """Write the memory of the largest compiled step next to that of the plan."""
        if compiled["total"] <= self._program_bytes:
            return
        self._program_bytes = compiled["total"]
        if forecast is not None:
            record = forecast.record() | {"compiled_bytes_per_device": compiled}
            self._directory.write_json("forecast.json", record)

    def summarize_trace(self, folder: Path, program: jax.stages.Compiled | None) -> None:
        """Print and write a summary of the time of the traced steps of a program."""
        if not self._directory.is_writer:
            return
        classify = hlo.classifier(program.as_text() or "" if program else "")
        try:
            summary = profiling.summary(profiling.newest_trace(folder), classify)
        except ValueError as error:  # no reason to end a run
            self._console.warn(f"the trace has no summary: {error}", step=self._directory.step)
            return
        self._directory.write_json("profile/summary.json", summary)
        seconds = formatting.duration(summary["seconds"])
        title = f"trace of {summary['steps']} steps, {seconds}, {folder}"
        self._console.block(title, profiling.facts(summary))

    def flush(self) -> None:
        """Return when every record so far would survive a crash of the machine."""
        for sink in (self._metrics, self._samples, self._spikes, self._rollouts):
            if sink is not None:
                sink.flush()

    def close(self) -> None:
        """Close all open files and trackers."""
        self._open.close()
