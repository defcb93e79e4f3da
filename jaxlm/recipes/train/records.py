"""Records of a run: metrics, samples, spikes, warnings, the verdict on a loss that is too high."""

import contextlib
import functools
import math
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.core import config
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import Diverged, JaxlmError
from jaxlm.data import baselines, loader
from jaxlm.monitor import formatting, profiling, sinks, trackers
from jaxlm.monitor.sinks import Sink
from jaxlm.parallel import hlo
from jaxlm.recipes.plan.predict import Forecast
from jaxlm.recipes.sampler import Continuation
from jaxlm.recipes.train.checkpointing import Rewind
from jaxlm.recipes.train.context import RunContext
from jaxlm.recipes.train.programs import Skips, TrainPrograms
from jaxlm.training import guard
from jaxlm.training.divergence import MARGIN, Coder, Divergence
from jaxlm.training.loop import BudgetSpent, Progress

PREVIEW_TOKENS = 24  # of a document in a record of spikes.jsonl
MAX_DOCUMENTS = 256  # in such a record
COUNTS = ("skipped_total", "overflows_total")  # metrics that are whole numbers
INTERNAL = ("verdict", "skipped_in_a_row")  # metrics that are recorded in other forms
DIVERGENCE_FILE = "divergence.json"


class MetricsLogger:
    """Writes the records of a run to its files, the console, the trackers and the callbacks.

    Only the process that writes the run directory opens files and calls callbacks; in the others
    nothing is written. Close it at the end.

    Args:
      context: the run around its programs.
      programs: the programs of the run.
      warn: called with a message if a tracker accepts no more records.
    """

    def __init__(self, context: RunContext, programs: TrainPrograms, warn: Log):
        self._context, self._programs, self._warn = context, programs, warn
        self._directory, self._console = context.directory, context.console
        self._dropped_tokens = DroppedTokenWarning(self._console.warn)
        self._program_bytes = 0  # on a device, of the largest program
        self._open = contextlib.ExitStack()
        self._metrics: Sink = sinks.NullSink()
        self._samples: Sink = sinks.NullSink()
        self._spikes: Sink = sinks.NullSink()
        self._sinks: list[Sink] = []

    def open(self, through: int) -> None:
        """Open the files, again after a rewind; records of steps after `through` are removed."""
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
        others = self._trackers(path, through)
        for sink in others:
            self._open.callback(sink.close)
        self._sinks = [self._metrics, self._console, *others, self._context.callbacks]

    def _trackers(self, path: Path, through: int) -> list[Sink]:
        """Return TensorBoard and the trackers that the config names."""
        makers: dict[str, Callable[[], Sink]] = {
            "tensorboard": lambda: sinks.TensorBoard(path / "events", keep_through=through),
        }
        settings = config.flatten(self._context.run)
        for name in trackers.MODULES:
            makers[name] = functools.partial(trackers.open_tracker, name, path, settings)
        return [
            trackers.GuardedSink(name, makers[name], self._warn)
            for name in self._context.run.log.sinks
            if name in makers
        ]

    def write(self, step: int, split: str, record: dict[str, Any]) -> None:
        """Write a record of metrics.jsonl to all sinks."""
        record = {"step": step, "time_unix": time.time(), "split": split} | record
        for sink in self._sinks:
            sink.write(record)

    def log(self, step: int, values: dict[str, float], measured: dict[str, Any]) -> None:
        """Write a logged step: its metrics, and figures that the host measured."""
        record: dict[str, Any] = {
            name: int(value) if name in COUNTS else value
            for name, value in values.items()
            if name not in INTERNAL
        }
        self.write(step, "train", record | measured)
        self._dropped_tokens.check(step, values)

    def note_skipped(self, step: int, values: dict[str, float], layers: dict[str, Any]) -> None:
        """Record a step that was not applied, with the documents of its batch, and print it.

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
        self._console.warn(
            f"step {step} was not applied: {evidence['kind']} (loss {values['loss_nats']:.4g},"
            f" gradient {values['grad_norm']:.4g}); {int(values['skipped_total'])} skipped so far,"
            " see spikes.jsonl",
            step=step,
        )

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
            self._samples.write({"step": step, "prompt": each.prompt, "text": each.text})

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
        operations = hlo.read_operations(program.as_text() or "") if program else {}

        def classify(name: str) -> tuple[str, str, bool]:
            is_known = name in operations
            return (*operations.get(name, hlo.operation_by_name(name)), is_known)

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
        for sink in (self._metrics, self._samples, self._spikes):
            sink.flush()

    def close(self) -> None:
        """Close all open files and trackers."""
        self._open.close()


class DroppedTokenWarning:
    """Warns of tokens that experts dropped: at the first, and whenever their share has doubled."""

    def __init__(self, warn: Callable[..., None]):
        self._warn, self._last_share = warn, 0.0

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Check the means of a logged step."""
        share = values.get("moe_dropped", 0.0)
        if share > 2 * self._last_share:
            self._last_share = share
            self._warn(
                f"step {step}: experts dropped {share:.2%} of the tokens routed to them, because"
                f" they were full (model.capacity); the largest load is"
                f" {values['moe_load_max']:.3g} times the mean; next warning when the share"
                " doubles",
                step=step,
            )


def spike_evidence(
    programs: TrainPrograms,
    step: int,
    values: dict[str, float],
    layers: dict[str, Any],
    skips: Skips,
) -> dict[str, Any]:
    """Return a record of spikes.jsonl for a step that was not applied.

    Args:
      programs: the programs of the run.
      step: number of the step.
      values: metrics of the step.
      layers: gradient norms by parameter and layer.
      skips: ranges of batches that the run leaves out.
    """
    number = loader.batch_number(step - 1, skips)
    documents, left_out = _documents(programs, number)
    return {
        "step": step,
        "kind": guard.describe_verdict(int(values["verdict"])),
        "in_a_row": int(values["skipped_in_a_row"]),
        **{name: values[name] for name in ("loss_nats", "grad_norm", "learning_rate")},
        "batch": number,
        "layers": {path: _finite(norm) for path, norm in layers.items()},
        "layers_not_finite": [path for path, norm in layers.items() if not np.isfinite(norm).all()],
        "documents": documents,
        "documents_left_out": left_out,
    }


def _finite(norm: Any) -> Any:
    """Return a norm, or the norms of layers, as JSON: null for numbers that are not finite."""
    if np.ndim(norm):
        return [_finite(value) for value in norm]
    return float(norm) if np.isfinite(norm) else None


def _documents(programs: TrainPrograms, number: int) -> tuple[list[dict[str, Any]], int]:
    """Return the documents of a batch with their first tokens, and the number beyond the limit."""
    train, decode, pace = programs.data.train, programs.data.tokenizer.decode, programs.pace
    rows = train.at(number, batch=pace, rows=slice(0, pace.phase(number).rows))
    documents = []
    for row, origins in enumerate(train.origins(number, batch=pace)):
        for segment, (file, record) in enumerate(origins, 1):
            ids = rows.tokens[row][rows.segments[row] == segment][:PREVIEW_TOKENS]
            preview = decode([int(i) for i in ids])
            documents.append({"row": row, "file": file, "record": record, "preview": preview})
    return documents[:MAX_DOCUMENTS], max(len(documents) - MAX_DOCUMENTS, 0)


# Divergence: a loss that is worse than that of coders without a model.


class DivergenceAlarm:
    """Judges the losses of a run; warns, or ends the run, by `guard.divergence`.

    Args:
      context: the run around its programs.
      programs: the programs of the run.
      ranking_set: the validation set that ranks checkpoints; None without one.
      progress: counters of the run, with the verdict so far.
      start: completed steps.
      finish_saves: returns when all saves are on disk.
    """

    def __init__(
        self,
        context: RunContext,
        programs: TrainPrograms,
        ranking_set: str | None,
        progress: Progress,
        start: int,
        finish_saves: Callable[[], None],
    ):
        self._context, self._programs = context, programs
        self._ranking_set, self._progress = ranking_set, progress
        self._finish_saves = finish_saves
        self._ids = programs.data.tokenizer.size
        uniform = math.log(self._ids)
        # A checkpoint of an earlier version does not have the first loss.
        first = progress.first_loss if progress.first_loss is not None or not start else uniform
        self._divergence = Divergence(
            steps=context.run.train.steps,
            uniform=uniform,
            unigram=functools.cache(self._unigram),
            first=first,
            best=math.inf if progress.best_loss is None else progress.best_loss,
            worse=progress.divergence["worse_than"] if progress.divergence else None,
        )
        self._reported: Coder | None = None  # by this process: each start reports it again

    @property
    def verdict(self) -> dict[str, Any] | None:
        """The verdict for the report and the closing block; None for a healthy loss."""
        return self._progress.divergence

    @property
    def training_mark(self) -> dict[str, Any]:
        """Fields of the record of a training step."""
        worse = self._divergence.training
        return {"worse_than": worse} if worse else {}

    def judge_training(self, step: int, values: dict[str, float]) -> None:
        """Judge the loss of a completed step that was applied. Raise Diverged as `_report` does."""
        if not values["verdict"]:
            self._divergence.train(step, values["loss_nats"])
            self._progress.first_loss = self._divergence.first
            median = self._divergence.median
            self._report(step, "train", values["loss_nats"] if median is None else median)

    def judge_evaluation(self, step: int, loss: float) -> dict[str, Any]:
        """Judge an evaluation of the ranking set, and return fields of its record."""
        worse = self._divergence.evaluated(step, loss)
        return {"worse_than": worse} if worse else {}

    def report_evaluation(self, step: int, loss: float) -> None:
        """Warn of a recorded evaluation, or end the run. Raise Diverged."""
        self._report(step, self._ranking_set or "train", loss)

    def is_worse_than_uniform(self, loss: float) -> bool:
        """Return whether a loss is above ln V."""
        return not loss <= self._divergence.uniform

    def write(self) -> None:
        """Write the verdict for the report, replacing an earlier one."""
        file = self._context.directory.path / DIVERGENCE_FILE
        if self.verdict is not None or file.exists():
            record = self.verdict or {"worse_than": None}
            self._context.directory.write_json(DIVERGENCE_FILE, record)

    def _report(self, step: int, split: str, loss: float) -> None:
        """Report that the loss became worse than a coder, or better again.

        Raises:
          Diverged: if the loss is worse than uniform, and `guard.divergence` is "stop".
        """
        worse = self._divergence.worse
        if worse == self._reported and (worse or not self.verdict):
            return
        self._reported = worse
        if worse is None:
            self._progress.divergence = None
            self._context.console.say(f"step {step}: the loss is better than the coders again")
            self.write()
            return
        before, verdict = self.verdict, self._judged(worse, step, split, loss)
        if before and before["worse_than"] == worse:
            verdict["step"] = before["step"]  # of the first report
        self._progress.divergence = verdict
        self.write()
        text = "{message}\n  likely cause: {cause}\n  to find a rate: {command}".format(**verdict)
        self._context.console.warn(f"step {step}: {text}", step=step, style="bold red")
        if worse == "uniform" and self._context.run.guard.divergence == "stop":
            self._finish_saves()
            raise Diverged(
                f"the run has diverged: {verdict['message']}",
                where=f"step {step}, {split}; guard.divergence = stop",
                why=f"likely, {verdict['cause']}",
                fix=f"{verdict['command']}\n"
                "--config.guard.divergence=warn    # resumes from the last saved step",
            )

    def _judged(self, worse: Coder, step: int, split: str, loss: float) -> dict[str, Any]:
        if worse == "uniform":
            nats, coder = self._divergence.uniform, f"each of {self._ids} ids equally likely"
        else:
            nats = self._divergence.unigram() or 0.0
            coder = "token frequencies of the training text"
        shown = f"{loss:.4f}" if loss < 1e4 else f"{loss:.3g}"
        path = self._context.directory.path
        words = ["jaxlm", "lr-find", f"--config={path / 'config.json'}", f"--out={path}-lr-find"]
        return {
            "worse_than": worse,
            "step": step,
            "split": split,
            "loss_nats": loss if math.isfinite(loss) else None,
            "coder_nats": nats,
            "outcome": f"worse than the {worse} coder, "
            + ("diverged" if self._has_risen(loss) else "nothing learned"),
            "message": f"the loss on {split}, {shown} nats, is worse than the {worse} coder "
            f"({nats:.2f} nats; {coder})",
            "cause": self._cause(loss),
            "command": shlex.join(words),
        }

    def _cause(self, loss: float) -> str:
        run, first = self._context.run, self._divergence.first
        rate = f"optim.lr = {run.optim.lr:g}"
        if first is not None and not self._has_risen(loss):
            if first > 1.5 * self._divergence.uniform:
                return (
                    f"the run began at {first:.4g} nats: weights that do not fit the tokenizer,"
                    f" or model.init; or {rate} is too low"
                )
            return f"{rate} is too low, or the run too short, for this model and data"
        spikes = "" if run.guard.sigmas is not None else "; guard.sigmas = None applies spikes"
        return f"{rate} is too high for this model, batch and schedule{spikes}"

    def _has_risen(self, loss: float) -> bool:
        """Return whether a loss is above the first one, or above the best evaluation."""
        lower = [self._divergence.first, self._progress.best_loss]
        return any(each is not None and not loss <= (1 + MARGIN) * each for each in lower)

    def _unigram(self) -> float | None:
        """Return the nats of the unigram coder on the ranking set; None unless it is plain text."""
        data = self._programs.data
        validation = data.validation.get(self._ranking_set or "")
        if validation is None or validation.corruption is not None:
            return None
        try:
            return baselines.unigram_nats(data.train.shards, validation.shards)
        except JaxlmError:  # a damaged shard, which the loader handles
            return None
