"""Records of a run in files, console and trackers: header, metrics, samples, spikes, summary."""

import contextlib
import functools
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxlm.core import config, tree
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import DataError
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.data import baselines, peek
from jaxlm.data.mixture import MixtureLoader
from jaxlm.generate.sampler import Continuation
from jaxlm.models.cost import model_cost
from jaxlm.monitor import formatting, plots, profiling, report, sinks, tensorboard, trackers
from jaxlm.monitor.metric_warnings import (
    DroppedTokenWarning,
    HeldOutRewardWarning,
    RedrawnSampleWarning,
    UnlikelierAnswerWarning,
)
from jaxlm.monitor.sinks import Jsonl, Sink
from jaxlm.monitor.tensorboard import TensorBoard
from jaxlm.parallel import hlo
from jaxlm.parallel import mesh as meshes
from jaxlm.parallel.config import format_mesh
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import attention_kernels
from jaxlm.recipes.plan.predict import Forecast
from jaxlm.recipes.train.api import RunContext
from jaxlm.recipes.train.checkpointing import Rewind
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.recipes.train.spikes import skip_notice, spike_evidence
from jaxlm.recipes.use.load import BASE
from jaxlm.training import guard
from jaxlm.training.loop import BudgetSpent
from jaxlm.training.rundir import read_json
from jaxlm.tune import surgery
from jaxlm.tune.config import FIRST, QLora

if TYPE_CHECKING:
    from jaxlm.recipes.train.trainer import Trainer

COUNTS = ("skipped_total", "overflows_total")  # metrics that are whole numbers
# Metrics that are recorded in other forms.
INTERNAL = ("verdict", "skipped_in_a_row", "tokens_read")
ROLLOUTS = "rollouts.jsonl"  # every sample that was drawn to train on
BRIEF = {
    *("devices", "model", "data", "run", "reward", "plan"),
    *("tasks", "tune", "resumed", "changed", "by"),  # of few runs
}


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
            nll = getattr(self._context.run.objective, "nll", 0.0)  # of preferences alone
            self._chosen = UnlikelierAnswerWarning(self._console.warn, known, nll)
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


def print_header(trainer: "Trainer", held_out: str = "") -> None:
    """Print the model, the data and the devices of a run.

    `held_out` is why a part of the training text is the validation set; empty if the user chose it.
    """
    run, data, model = trainer.run_config, trainer.programs.data, trainer.programs.model
    mesh, decoder = model.mesh, model.blueprint.config
    train = data.train.shards.manifest
    kind = mesh.devices.flat[0].device_kind
    parameters = formatting.count(model_cost.parameters(decoder))
    if isinstance(data.train, MixtureLoader):
        amount = f"{len(data.train.sources)} sources"
        sources = [*data.train.describe(run.pace, run.train.steps)]  # what each will have read
    else:
        passes = data.train.epochs(run.rows)
        if run.objective.samples_answers:  # a prompt has several rows, in each epoch of a rollout
            passes = run.rows / (run.rl.samples * run.rl.epochs * train.documents)
        amount, sources = f"{passes:.3g} epochs", []
    if train.figures and not run.objective.samples_answers:
        amount += f"; {train.trained / train.tokens:.1%} of the tokens are trained"
    facts = [
        ("processes", _processes(trainer)),
        ("devices", f"{mesh.devices.size} x {kind}, mesh {format_mesh(mesh.shape)}"),
        (
            "model",
            f"{run.model.family}, {parameters} parameters: depth {decoder.depth},"
            f" width {decoder.width}, {decoder.vocab} ids ({data.tokenizer.size} in use)",
        ),
        *_adapter(trainer),
        (
            "data",
            f"{formatting.count(train.documents)} documents, {formatting.count(train.tokens)}"
            f" tokens, {formatting.size(train.bytes)}; {amount}",
        ),
        *(("source", line) for line in sources),
        ("", _example(trainer)),
        ("memory", _memory(trainer)),
        (
            "run",
            f"{run.train.steps} steps of {run.train.batch} rows x {run.data.sequence} tokens,"
            f" {run.optim.name} at {run.optim.lr:g}, {run.schedule.name},"
            f" {_arithmetic(run.precision)}",
        ),
        *(("stage", line) for line in _phases(trainer)),
        *_reward(run),
        ("plan", _plan(trainer)),
        ("checks", _checks(trainer)),
        (
            "attention",
            attention_kernels.describe_kernels(run, decoder, mesh.shape, setup.target(mesh)),
        ),
    ]
    if data.validation:
        sets = _validation(trainer)
        facts.append(("validation", f"{sets}; {held_out}" if held_out else sets))
    if trainer.tasks is not None:
        facts.append(("tasks", trainer.tasks.describe()))
    if run.objective.name != "causal":
        facts.append(("objective", _objective(trainer)))
    if trainer.programs.reference:
        facts.append(("reference", trainer.programs.reference))
    if schedule := model.blueprint.schedule:
        facts.append(("pipeline", f"{schedule}: each stage idles {schedule.bubble:.0%} of ticks"))
    if trainer.start:
        facts.append(("resumed", f"after step {trainer.start}"))
    facts += [("changed", str(change)) for change in trainer.changes]
    if flags := str(trainer.context.options.resume):
        facts.append(("by", flags))
    title = f"jaxlm train, {trainer.context.directory.path}"
    trainer.context.console.block(title, facts, brief=BRIEF)


def _reward(run: Run) -> list[tuple[str, str]]:
    """Return the fact of the rewards, and of the samples that get them."""
    if not (run.objective.samples_answers and run.reward.functions):
        return []
    samples = f"{run.rl.samples} samples of each prompt, at most {run.rl.max_tokens} tokens each"
    return [("reward", f"{', '.join(run.reward.functions)}; {samples}")]


def _objective(trainer: "Trainer") -> str:
    """Return the objective, the slots that it adds to rows, and how validation sets are read."""
    run, validation = trainer.run_config, trainer.programs.data.validation
    corruption = trainer.programs.data.train.corruption
    room = corruption.reserved_slots if corruption else 0
    parts: list[str] = [run.objective.name]
    if run.objective.teacher:
        parts.append(f"teacher {run.objective.teacher}")
    if (stored := trainer.programs.data.train.teacher) is not None:
        facts = stored.facts
        parts.append(f"the {facts.top} likeliest ids of step {facts.step} of {facts.run}")
    if room:
        length = run.data.sequence - room
        parts.append(f"rows have {length} tokens of text, and {room} slots for added tokens")
    is_causal = not (run.objective.compares_answers or run.objective.samples_answers)
    if is_causal and any(loader.corruption is None for loader in validation.values()):
        parts.append("evaluated as causal")
    if run.sample.prompts and not trainer.evaluator.has_samples:
        parts.append("no samples: the model does not learn to continue a prompt")
    return "; ".join(parts)


def _phases(trainer: "Trainer") -> Iterator[str]:
    """Yield the phases of a warm-up of the batch size or the sequence length."""
    phases, last = trainer.programs.pace.phases, trainer.run_config.train.steps
    for phase, end in zip(phases, [*(each.first for each in phases[1:]), last], strict=True):
        rows = phase.rows * trainer.run_config.data.sequence // phase.length
        first = phase.first + 1
        span = f"steps {first} to {end}" if end > first else f"step {end}"
        if len(phases) > 1:
            yield (
                f"{span}: {rows} rows x {phase.length} tokens, "
                f"{rows * phase.length:,} a step, compiled once"
            )


def _validation(trainer: "Trainer") -> str:
    """Return the validation sets, and the one that ranks checkpoints if there are several."""
    sets = [
        f"{name} ({formatting.count(loader.shards.manifest.tokens)} tokens)"
        for name, loader in trainer.programs.data.validation.items()
    ]
    ranking = f"; {trainer.evaluator.ranking_set} ranks checkpoints" if len(sets) > 1 else ""
    return ", ".join(sets) + ranking


def _arithmetic(precision: PrecisionConfig) -> str:
    """Return the dtype of products, and the dtypes and rounding of everything else."""
    parts = [str(precision.compute)]
    if precision.products != "compute":
        parts.append(f"projections in {precision.products}")
    if precision.params != "float32":
        parts.append(
            f"parameters in {precision.params} with stochastically rounded updates, "
            f"moments in {precision.moments}"
        )
    elif precision.moments != "float32":
        parts.append(f"moments in {precision.moments}, stochastically rounded")
    return ", ".join(parts)


def _processes(trainer: "Trainer") -> str:
    """Return the number of processes and its origin, and the mesh axes that cross slices."""
    process, mesh = trainer.context.options.process, trainer.programs.model.mesh
    slices = meshes.slices(list(mesh.devices.flat))
    crossing = format_mesh(meshes.axis_crossings(dict(mesh.shape), slices)) if slices > 1 else ""
    groups = f"; {slices} groups of devices, between them {crossing}" if crossing else ""
    return f"{process.count or 1}: {process.source}{groups}"


def _memory(trainer: "Trainer") -> str:
    """Return the memory of the state on a device by its layout, without activations."""
    programs, run = trainer.programs, trainer.run_config
    whole = formatting.size(tree.size_bytes(programs.shapes))
    parts = " + ".join(
        f"{formatting.size(size)} of {name}" for name, size in programs.bytes_per_device().items()
    )
    offloaded = ", the optimizer state on the host between steps" if run.train.offload else ""
    return (
        f"{whole} of weights and optimizer state; each device has {parts}"
        f" (zero={run.mesh.zero}){offloaded}"
    )


def _plan(trainer: "Trainer") -> str:
    """Return the forecast of `jaxlm plan` for this run on these devices."""
    forecast, steps = trainer.forecast, trainer.run_config.train.steps
    if forecast is None:
        return "none: this chip is in no table"
    low, high = forecast.seconds
    return (
        f"{formatting.size(forecast.bytes_per_device['total'])} of"
        f" {formatting.size(forecast.memory_bytes)} a device,"
        f" {formatting.size(forecast.evaluation_bytes)} in an evaluation;"
        f" {formatting.duration(low)} to {formatting.duration(high)} a step,"
        f" {formatting.duration(steps * low)} to"
        f" {formatting.duration(steps * high)} for {steps:,} steps"
    )


def _checks(trainer: "Trainer") -> str:
    """Return the checks that passed; memory is checked when the step is compiled."""
    checks = ["settings", "sizes on the mesh", "data", "ids of the tokenizer"]
    if trainer.start:
        checks.append("the checkpoint by its digests")
    if trainer.run_config.checkpoint.space != "ignore":
        checks.append("space for checkpoints")
    if trainer.context.processes.peers.count > 1:
        checks.append("the same on all processes")
    return f"{', '.join(checks)}: ok"


def _adapter(trainer: "Trainer") -> list[tuple[str, str]]:
    """Return the line about an adapter: its parameters, and the base."""
    run, programs = trainer.run_config, trainer.programs
    if programs.base is None:
        return []
    leaves = tree.leaves(programs.shapes.params)
    trained = tree.count([leaf for path, leaf in leaves.items() if not path.endswith(FIRST)])
    whole = tree.count(programs.model.plain.shapes)
    base = read_json(trainer.context.directory.path, BASE)
    line = (
        f"{run.tune.name}, {formatting.count(trained)} trained parameters ({trained / whole:.2%})"
    )
    if isinstance(run.tune, QLora):
        weights = surgery.quantized_weights(programs.model.stored)
        sizes = tree.leaves(programs.model.plain.shapes)
        count = sum(sizes[path].size for path in weights)
        parts = (
            leaf
            for path, leaf in tree.leaves(programs.base).items()
            if path.startswith(tuple(f"{each}_" for each in weights))
        )
        bits = 8 * sum(leaf.size * leaf.dtype.itemsize for leaf in parts) / count
        line += f", {formatting.count(count)} weights of the base in {run.tune.base}"
        line += f", {bits:.3f} bits each"
    return [("tune", f"{line}; base {base['run']}, step {base['step']}")]


def _example(trainer: "Trainer") -> str:
    """Return the start of one row, with its trained tokens marked."""
    data, pace = trainer.programs.data, trainer.programs.pace
    row = data.train.at(trainer.start, batch=pace, rows=slice(0, 1))
    return peek.example(peek.render_segments(row, data.tokenizer, 0)[0])


def write_partial_report(path: Path) -> None:
    """Write the report of a run that did not reach its end: at once, and again with its plots.

    Raises JaxlmError if a file of the run is damaged, or one cannot be written.
    """
    report.write(path)
    plots.draw(path)
    report.write(path)


def print_summary(trainer: "Trainer") -> dict[str, Any]:
    """Print the closing block, write plots and report, and return the result of the run."""
    directory, evaluation = trainer.context.directory, trainer.evaluation
    path = directory.path
    result = (evaluation or {}) | {
        "step": directory.step,
        "complete": directory.step >= trainer.run_config.train.steps,
        "workdir": str(path),
    }
    if not directory.is_writer:
        return result
    result |= _compare_with_baselines(trainer)
    trainer.alarm.write()
    verdict = trainer.alarm.verdict
    if verdict:
        result["divergence"] = verdict
    plots.draw(path)
    result["report"] = str(report.write(path))
    facts = [("best", _best(trainer))]
    if verdict:
        facts = [
            ("verdict", f"{verdict['message']}, since step {verdict['step']}"),
            ("cause", f"likely, {verdict['cause']}"),
            *facts,
        ]
    if advice := report.batch_advice(sinks.read(path / "metrics.jsonl")):
        facts.append(("batch", advice))
    facts.append(("report", str(path / "report.html")))
    if "tensorboard" in trainer.run_config.log.sinks:
        facts.append(("curves", tensorboard.command(path)))
    if commands := _next_commands(trainer, verdict):
        facts.append(("next", commands))
    title = f"done at step {directory.step}, {formatting.count(trainer.progress.tokens)} tokens"
    trainer.context.console.block(
        f"{title}: {verdict['outcome']}" if verdict else title,
        facts,
        style="bold red" if verdict else "bold",
        alarm="verdict",
    )
    return result


def _compare_with_baselines(trainer: "Trainer") -> dict[str, Any]:
    """Print bits per byte of the run and of coders without a model, and return the latter.

    Empty if the objective predicts a part of the text, or reads more of it: then the figures cannot
    be compared.
    """
    ranking_set, evaluation = trainer.evaluator.ranking_set, trainer.evaluation
    loader = trainer.programs.data.validation[ranking_set] if ranking_set else None
    if loader is None or not loader.predicts_all or not evaluation:
        return {}
    directory = trainer.context.directory
    text = baselines.stored_text(loader.shards)
    coders = baselines.bits_per_byte(text)
    directory.write_json("baselines.json", coders)
    name = "this run" + formatting.evaluation_suffix(evaluation, directory.step)
    rows = [*coders.items(), (name, evaluation["bits_per_byte"] or math.nan)]
    title = f"validation set {ranking_set}, bits per byte"
    if len(text) == baselines.MEASURED_BYTES:
        title += f"; of the compressors on its first {formatting.size(len(text))}"
    trainer.context.console.block(
        title,
        [
            (coder, f"{bits:.4f}" + (" <" if coder == name else ""))
            for coder, bits in sorted(rows, key=lambda row: -row[1])
        ],
    )
    return {"baselines": coders}


def _best(trainer: "Trainer") -> str:
    """Return the best evaluation."""
    progress, batches = trainer.progress, trainer.run_config.evaluated_batches
    loss, ranking_set = progress.best_loss, trainer.evaluator.ranking_set
    if loss is None or ranking_set is None:
        return "no evaluation"
    is_whole = trainer.programs.evaluates_all(ranking_set)
    sample = "" if is_whole else f", {batches} batches of it"
    warning = ", worse than uniform" if trainer.alarm.is_worse_than_uniform(loss) else ""
    figure = f"{loss:.4f} nats"
    if trainer.run_config.objective.samples_answers:  # whose loss is the negative reward
        figure, warning = f"reward {-loss:z.4f}", ""
    return f"step {progress.best_step}, {figure} on {ranking_set}{sample}{warning}"


def _next_commands(trainer: "Trainer", verdict: dict[str, Any] | None) -> str:
    """Return commands that use or resume this run: none that its objective or data refuse.

    The first one is that of the `verdict` of a run that diverged.
    """
    workdir = shlex.quote(str(trainer.context.directory.path))
    lines = [verdict["command"]] if verdict else []
    if trainer.context.directory.step < trainer.run_config.train.steps:
        lines.append(trainer.context.options.resume_command)
    lines += [f"jaxlm eval --workdir={workdir}"] if trainer.programs.data.validation else []
    if trainer.run_config.objective.prompts != "none":
        data = trainer.programs.data
        has_plain = "plain" in data.train.shards.manifest.figures  # texts without the template
        chat = "" if data.template is None or has_plain else " --chat"
        lines.append(f"jaxlm generate --workdir={workdir} --prompt='...'{chat}")
    return "\n".join(lines)
