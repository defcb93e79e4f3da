"""What a run writes down while it is trained."""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.core import config
from jaxlm.data import loader
from jaxlm.monitor import formatting, sinks, traced, trackers
from jaxlm.monitor.console import Console
from jaxlm.monitor.sinks import Callbacks, Sink
from jaxlm.parallel import hlo_operations
from jaxlm.recipes.plan.predict import Forecast
from jaxlm.recipes.sampler import Continuation
from jaxlm.recipes.train.checkpointing import Rewind, Rewinds
from jaxlm.recipes.train.programs import Skips, TrainPrograms
from jaxlm.training import guard
from jaxlm.training.loop import BudgetSpent
from jaxlm.training.rundir import RunDir

# What a step that was not applied had read.


PREVIEW_TOKENS = 24
MAX_DOCUMENTS = 256  # in one record


def spike_evidence(
    engine: TrainPrograms, step: int, values: dict[str, float], layers: dict[str, Any], skips: Skips
) -> dict[str, Any]:
    """One line of spikes.jsonl: the verdict, the numbers, the gradient's norm by layer, and the documents of the batch."""
    number = loader.number(step - 1, skips)
    documents, left_out = _documents(engine, number)
    return {
        "step": step,
        "kind": guard.words(int(values["verdict"])),
        "in_a_row": int(values["skipped_in_a_row"]),
        **{name: values[name] for name in ("loss_nats", "grad_norm", "learning_rate")},
        "batch": number,
        "layers": {path: _plain(norm) for path, norm in layers.items()},
        "layers_not_finite": [path for path, norm in layers.items() if not np.isfinite(norm).all()],
        "documents": documents,
        "documents_left_out": left_out,
    }


def _plain(norm: Any) -> Any:
    """A norm, or one for each layer, as JSON: null where it is not finite."""
    if np.ndim(norm):
        return [_plain(value) for value in norm]
    return float(norm) if np.isfinite(norm) else None


def _documents(engine: TrainPrograms, number: int) -> tuple[list[dict[str, Any]], int]:
    """The documents that a batch is made of, each with how it begins in that row; and how many more there are."""
    train, decode = engine.data.train, engine.data.tokenizer.decode
    pace = engine.pace
    rows = train.at(number, batch=pace, rows=slice(0, pace.phase(number).rows))
    found = []
    for row, origins in enumerate(train.origins(number, batch=pace)):
        for segment, (file, record) in enumerate(origins, 1):
            ids = rows.tokens[row][rows.segments[row] == segment][:PREVIEW_TOKENS]
            preview = decode([int(i) for i in ids])
            found.append({"row": row, "file": file, "record": record, "preview": preview})
    return found[:MAX_DOCUMENTS], max(len(found) - MAX_DOCUMENTS, 0)


# Telling that experts were full.


class DroppedTokenWarning:
    """Warns where choices of an expert found no place: at the first, and whenever their share is over twice the one last told."""

    def __init__(self, warn: Callable[..., None]):
        self._warn, self._told = warn, 0.0

    def look(self, step: int, values: Mapping[str, float]) -> None:
        """Looks at the means of a logged step."""
        share = values.get("moe_dropped", 0.0)
        if share > 2 * self._told:
            self._told = share
            self._warn(
                f"step {step}: {share:.2%} of the tokens' choices of an expert were dropped, as those were full "
                f"(model.capacity), the largest load is {values['moe_load_max']:.3g} of the mean; told again at twice that",
                step=step,
            )


COUNTS = ("skipped_total", "overflows_total")  # metrics that are whole numbers
INNER = ("verdict", "skipped_in_a_row")  # those that are told in other words


class MetricsLogger:
    """Records of steps and of evaluations, samples, steps that were not applied, the memory of the step, the summary of a trace.

    Only the process that writes the run directory opens any file, and tells the caller's functions; in the others nothing
    comes of what is recorded. Close it at the end.

    Args:
      warn: is told of a tracker that takes nothing more.
    """

    def __init__(
        self,
        engine: TrainPrograms,
        directory: RunDir,
        console: Console,
        rewinds: Rewinds,
        callbacks: Callbacks,
        warn: Callable[[str], None],
    ):
        self._engine, self._directory, self._console = engine, directory, console
        self._rewinds, self._callbacks, self._warn = rewinds, callbacks, warn
        self._dropping = DroppedTokenWarning(console.warn)
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
        found = spike_evidence(self._engine, step, values, layers, self._rewinds.skips)
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

    def note_samples(self, step: int, samples: list[Continuation]) -> None:
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
        known = hlo_operations.read(program.as_text() or "") if program else {}

        def tell(name: str) -> tuple[str, str, bool]:
            return (*known.get(name, hlo_operations.by_name(name)), name in known)

        try:
            found = traced.summary(traced.newest(folder), tell)
        except ValueError as error:  # a run does not end for it
            self._console.warn(f"the trace has no summary: {error}", step=self._directory.step)
            return
        self._directory.write_json("profile/summary.json", found)
        title = (
            f"trace of {found['steps']} steps, {formatting.duration(found['seconds'])}, {folder}"
        )
        self._console.block(title, traced.facts(found))

    def flush(self) -> None:
        """Returns when every line so far would survive the death of the machine."""
        for sink in (self._metrics, self._samples, self._spikes):
            sink.flush()

    def close(self) -> None:
        """Closes what is open."""
        self._open.close()
