"""A run while it is trained: its state, what is due when, its clock, and the way back to an earlier step."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.checkpoint.store import Store
from jaxlm.core import config, faults
from jaxlm.core.batch_schedule import Phase
from jaxlm.core.errors import Diverged, Preempted
from jaxlm.core.span import Span
from jaxlm.data import loader
from jaxlm.data import loader as loaders
from jaxlm.data.mixture import Mixture
from jaxlm.evals.config import EvalConfig
from jaxlm.models.cost import model_cost
from jaxlm.monitor import chips, host_memory, sinks
from jaxlm.monitor.clock import Clock
from jaxlm.monitor.console import Console
from jaxlm.monitor.profile import Trace
from jaxlm.monitor.sinks import Callbacks
from jaxlm.optim.average_config import NoAverage, start
from jaxlm.recipes import setup
from jaxlm.recipes.plan import oom
from jaxlm.recipes.plan.predict import Forecast
from jaxlm.recipes.sampler import Sampler
from jaxlm.recipes.train import initial_state, resume
from jaxlm.recipes.train.checkpointing import CheckpointSaver, Rewinds, SaveRequest
from jaxlm.recipes.train.divergence_warning import Alarm
from jaxlm.recipes.train.initial_state import InitSource
from jaxlm.recipes.train.layer_stats import LayerStatsCollector
from jaxlm.recipes.train.programs import Skips, TrainPrograms
from jaxlm.recipes.train.records import MetricsLogger
from jaxlm.recipes.train.resume import ResumeOptions
from jaxlm.training import control, loop
from jaxlm.training.cadence import Cadence
from jaxlm.training.control import Control
from jaxlm.training.loop import BudgetSpent, Hooks, Progress
from jaxlm.training.processes import ProcessGroup
from jaxlm.training.rundir import RunDir
from jaxlm.training.signals import StopRequest
from jaxlm.training.state import TrainState
from jaxlm.training.step import Metrics

# The compiled step, and now and then a doubt whether the devices still compute.


RECOMPILED = "the same command again goes on from the last committed step; a device that does this twice is broken"


class CompiledStep:
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
        engine: TrainPrograms,
        crew: ProcessGroup,
        console: Console,
        workdir: Path,
        forecast: Forecast | None,
        compiled: Callable[[jax.stages.Compiled], object],
        pause: Callable[[], contextlib.AbstractContextManager[object]],
    ):
        self._engine, self._crew, self._console, self._then = engine, crew, console, compiled
        self._workdir, self._forecast, self._pause = workdir, forecast, pause
        self.watching: LayerStatsCollector | None = None
        self._steps: dict[tuple[int, ...], jax.stages.Compiled] = {}
        self._observers: dict[tuple[int, ...], jax.stages.Compiled] = {}
        self.completed = 0  # steps before the one that comes next
        self._rate, self._placed = 1.0, engine.lr_scale(1.0)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One step. Raises Diverged where devices disagree."""
        rows, length = shape = batch.tokens.shape
        if shape not in self._steps:
            if self._steps:  # a pause begins when no step is under way
                jax.block_until_ready(state)
            of = f" for {rows} rows x {length} tokens" if len(self._engine.pace.phases) > 1 else ""
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

    def set_lr_scale(self, rate: float) -> None:
        """From the next step on, the learning rate is the schedule's times `rate`."""
        if rate != self._rate:
            self._rate, self._placed = rate, self._engine.lr_scale(rate)

    def _watch(self, program: jax.stages.Compiled) -> None:
        """Begins to watch the layers by a program that fits the device, or goes on to."""
        run, mesh = self._engine.run, self._engine.model.mesh
        oom.check(run, self._forecast, compiled_memory(program)["total"])
        if self.watching is None:
            before = sinks.read(self._workdir / "metrics.jsonl")
            self.watching = LayerStatsCollector(run, dict(mesh.shape), before)

    def _compare(self, state: TrainState) -> None:
        if differences := self._engine.replicas.differences(state.params):
            raise Diverged(
                f"copies of the parameters differ between devices, in {len(differences)} leaves",
                where=f"before step {self.completed + 1}",
                why="\n".join(differences[:4]),
                fix=RECOMPILED,
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
                fix=RECOMPILED,
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


# How well a run does, seen between its steps: on its validation sets, and in samples.


class Evaluator:
    """The evaluations and samples of a run, which the journal gets.

    `followed` is the validation set whose loss ranks checkpoints, None where there is none; `has_samples` says whether the
    run samples at all.

    Raises:
      ConfigError: where the run follows a set that there is not, or prompts do not fit the model's positions.
    """

    def __init__(self, engine: TrainPrograms, journal: MetricsLogger):
        run = engine.run
        self._engine, self._journal = engine, journal
        self.followed = setup.ranking_set(run, engine.data.validation)
        self.has_samples = bool(run.sample.prompts) and run.objective.prompts != "none"
        self._sampler = Sampler(
            dataclasses.replace(run.sample.request, seed=(run.seed,)),
            engine.model.blueprint,
            engine.data.tokenizer,
            both_ways=run.objective.prompts == "both ways",
        )

    def evaluate(
        self,
        state: TrainState,
        step: int,
        judge: Callable[[int, float], dict[str, Any]] = lambda step, loss: {},
    ) -> tuple[dict[str, Any], float]:
        """The figures of the set that is followed, and the loss that ranks this step among the others.

        Those of every set are written down, and those of the average as NAME.ema or NAME.swa. They are of whole sets at the
        beginning and at the end of the run, else of as much as `eval.batches` says. What ranks is always of as much.
        `judge` returns what the record of the followed set says beside, from the step and its loss.
        """
        run = self._engine.run
        every = None if run.eval.batches == "all" else run.eval.batches
        limit = None if step in (0, run.train.steps) else every
        results = ranked = self._engine.evaluate(state.params, limit=limit)
        if limit != every and step:
            ranked = self._engine.evaluate(state.params, limit=every)
        kept = run.average
        if not isinstance(kept, NoAverage) and step >= start(kept, run.train.steps, run.pace):
            of_average = self._engine.evaluate(self._engine.averaged(state), limit=limit)
            results |= {f"{name}.{kept.name}": each for name, each in of_average.items()}
        assert self.followed is not None  # else no evaluation is due
        for name, record in results.items():
            mark = judge(step, record["loss_nats"]) if name == self.followed else {}
            self._journal.write(step, name, record | mark)
        return results[self.followed] | {"step": step}, ranked[self.followed]["loss_nats"]

    def sample(self, state: TrainState, step: int) -> None:
        """Writes down what follows each prompt."""
        self._journal.note_samples(step, self._sampler.write(state.params))


# What the clock of a run goes by: the model FLOPs of its steps, and the peak of its devices.


def build_clock(engine: TrainPrograms, start: int) -> Clock:
    """The clock of the steps after `start` completed ones."""
    run = engine.run
    half, full = _flops_per_token(engine, run.data.sequence)
    kinds = [device.device_kind for device in engine.model.mesh.devices.flat]
    return Clock(
        start=start,
        steps=run.train.steps,
        flops_per_step=half * run.tokens_per_step,
        flops_per_step_full=full * run.tokens_per_step,
        peak_flops=chips.peak_flops(kinds[0], len(kinds)),
    )


def flops_by_phase(engine: TrainPrograms) -> dict[Phase, tuple[float, ...]]:
    """Model FLOPs of a step in each stage over those of one in the last, by both conventions: see `Clock.add`."""

    def flops(stage: Phase) -> list[float]:
        return [each * stage.rows for each in _flops_per_token(engine, stage.length)]

    *_, last = stages = engine.pace.phases
    whole = flops(last)
    return {
        stage: tuple(part / of for part, of in zip(flops(stage), whole, strict=True))
        for stage in stages
    }


def _flops_per_token(engine: TrainPrograms, length: int) -> tuple[float, float]:
    """With attention at its causal half, and in full."""
    flops = functools.partial(
        model_cost.flops_per_token, engine.model.blueprint.config, length, targets=engine.targets
    )
    return flops(causal=True), flops(causal=False)


# What a run has read of each source of its mixture, counted on the host: exact, and saved with each checkpoint.


def count_sources(engine: TrainPrograms, number: int, read: dict[str, list[int]]) -> list[str]:
    """Adds what the batch of a number read, the whole of it on every host, to rows and tokens by source.

    The names are of the sources that have come to their most epochs with it.
    """
    train, pace = engine.data.train, engine.pace
    if not isinstance(train, Mixture):
        return []
    start, stop = pace.rows(number), pace.rows(number + 1)
    for name, (rows, tokens) in train.read(start, stop).items():
        before = read.get(name, [0, 0])
        read[name] = [before[0] + rows, before[1] + tokens]
    return list(train.ended(start, stop))


def source_metrics(
    engine: TrainPrograms, step: int, read: dict[str, list[int]], skips: Skips
) -> dict[str, Any]:
    """The metrics of sources after so many steps: `sources/NAME/rows`, `tokens`, `epochs` and, of the row to come, `weight`.

    Tokens are those of text, whatever of them an objective predicts. Batches that a rewind left out are not counted.
    """
    train = engine.data.train
    if not isinstance(train, Mixture):
        return {}
    weights = train.shares.at(engine.pace.rows(loader.number(step, skips))).tolist()
    found: dict[str, Any] = {}
    for name, source, weight in zip(train.names, train.sources, weights, strict=True):
        rows, tokens = read[name]
        epochs = rows / source.plan.rows
        values = {"rows": rows, "tokens": tokens, "epochs": epochs, "weight": weight}
        found |= {f"sources/{name}/{what}": value for what, value in values.items()}
    return found


class Trainer:
    """A run while it is trained: what the loop's hooks do, and what they share. Its journal writes down what happens."""

    def __init__(
        self,
        engine: TrainPrograms,
        crew: ProcessGroup,
        directory: RunDir,
        console: Console,
        store: Store,
        rewinds: Rewinds,
        wish: ResumeOptions,
        meta: dict[str, Any] | None,
        changes: list[config.Change],
        origin: InitSource | None = None,
        callbacks: Callbacks | None = None,
    ):
        self.engine, self.run, self.crew = engine, engine.run, crew
        self.directory, self.console, self.store = directory, console, store
        self.rewinds, self.wish, self.changes = rewinds, wish, changes
        self._callbacks = callbacks or Callbacks()
        self._take_up(meta)
        self._begun_at, self._origin = self.start, origin
        run = self.run
        crew.watch.about["data"] = (
            f"reading {', '.join(run.data.train)} from {engine.data.train.shards.folder}"
        )
        self._journal = MetricsLogger(
            engine, directory, console, rewinds, self._callbacks, self._note_damage
        )
        self.assessment = Evaluator(engine, self._journal)
        self.alarm = self._new_alarm()
        # One for each process.
        self._trace = Trace(
            run.profile,
            directory.path / "profile",
            lambda: self._journal.summarise_trace(self._trace.folder, self._program),
        )
        self._program: jax.stages.Compiled | None = None
        self._work = flops_by_phase(engine)
        self.forecast = oom.forecast_here(run, engine.model.blueprint.config)
        self._step = CompiledStep(
            engine,
            crew,
            console,
            directory.path,
            self.forecast,
            self._compiled,
            lambda: self._clock.pause("compile"),
        )
        changes_made = control.known(directory.path, meta or {}, crew.share)
        self._control = Control(directory, run.optim.lr, changes_made, console.say)
        self._saves = CheckpointSaver(
            engine, crew, directory, console, store, rewinds, self._control
        )
        directory.make_room = self._saves.wait

    def train(self, stop: StopRequest, stop_at: int | None) -> None:
        """Makes or restores the state, and runs the loop; goes back and around what the guard could not get over."""
        with contextlib.closing(self._journal), contextlib.closing(self._trace):
            self._journal.open(self.start)
            while True:
                try:
                    with oom.explain_oom(self.run, self.forecast):
                        self._loop(self._state(), stop, stop_at)
                    break
                except Preempted:
                    self._finish_saves()  # "saved" must be true before it is said
                    self._callbacks.fail()
                    raise
                except BudgetSpent as spent:
                    self._rewind(spent)
            with self.crew.watch.phase("save"):
                self._saves.finish()
                self.store.close()
        self._callbacks.fail()

    def _take_up(self, meta: dict[str, Any] | None) -> None:
        """What the host knows at the step of a checkpoint; None is the beginning."""
        self.start: int = meta["step"] if meta else 0
        self.progress = Progress(**meta["progress"]) if meta else Progress()
        if meta and not _rank_together(meta["config"]["eval"], self.run.eval):
            self.progress.forget()
        self.evaluation: dict[str, Any] | None = meta["evaluation"] if meta else None
        self.directory.step = self._counted = self.start

    def _state(self) -> TrainState:
        """The state before the first step from here on."""
        if self._origin is not None and not self.store.steps():
            with self.crew.watch.phase("save"), self.console.timer(f"taking {self._origin}"):
                state = initial_state.state(self.engine, self._origin)
            if self.assessment.followed:  # what it knew before, on the same sets as after
                with (
                    self.crew.watch.phase("eval"),
                    self.console.timer(f"evaluating {self._origin}"),
                ):
                    self.evaluation, _ = self.assessment.evaluate(state, 0)
            with self.crew.watch.phase("save"), self.console.timer("saving where it begins"):
                self._journal.flush()
                self._saves.save(SaveRequest(0, state, self.progress, self.evaluation, None))
                self._saves.finish()
                return state
        if not self.start:
            return initial_state.initial_state(self.engine, self.store)
        # After a rewind: a checkpoint of this very start is taken up as it is.
        wish = self.wish if self.start <= self._begun_at else ResumeOptions()
        with self.crew.watch.phase("save"), self.console.timer(f"restoring step {self.start}"):
            return resume.state(self.engine, self.store, self.start, wish)

    def _loop(self, state: TrainState, stop: StopRequest, stop_at: int | None) -> None:
        run = self.run

        def cadence(name: str, span: Span | None = None) -> Callable[[int], bool]:
            """What must be due on all processes or on none: as the section of this name says, or by a span of its own."""
            return Cadence(
                getattr(run, name).every if span is None else span,
                total=run.train.steps,
                tokens_per_step=run.pace if run.train.batch_warmup else run.tokens_per_step,
                share=self.crew.sharer(f"cadence/{name}"),
            ).is_due

        is_save_due = cadence("checkpoint")
        self._is_control_due = cadence("control", run.train.control)
        self._clock = build_clock(self.engine, self.start)
        hooks = Hooks(
            is_log_due=cadence("log"),
            is_eval_due=cadence("eval") if self.assessment.followed else lambda _: False,
            is_sample_due=cadence("sample") if self.assessment.has_samples else lambda _: False,
            is_save_due=lambda step: is_save_due(step) or self._saves.is_retry_due,
            before=self._before,
            count=self._count,
            log=self._log,
            skipped=self._journal.note_skipped,
            evaluate=self._evaluate,
            sample=self._sample,
            save=self._save,
            check_saves=self._saves.check,
            enter=self._enter,
            is_over=self._is_over,
        )
        loop.run(
            self._step,
            state,
            self.engine.batches(self.start, self.rewinds.skips, self._note_damage),
            start=self.start,
            steps=run.train.steps,
            stop_at=min(stop_at or run.train.steps, run.train.steps),
            progress=self.progress,
            hooks=hooks,
            stop=stop,
            patience=run.train.patience,
            keep_best=run.checkpoint.keep_best > 0,
            budget=run.guard.budget,
        )

    def _compiled(self, step: jax.stages.Compiled) -> None:
        """Compares what the step needs with what there is. With the first one the clock begins anew."""
        is_first, self._program = self._program is None, step
        held = compiled_memory(step)
        self._journal.note_memory(self.forecast, held)
        oom.check(self.run, self.forecast, held["total"])
        if is_first:
            self._clock = build_clock(self.engine, self.start)

    def _before(self, completed: int) -> None:
        self._step.completed = completed
        if self._is_control_due(completed):
            self._control.look(completed, functools.partial(self.crew.share, "control"))
        self._step.set_lr_scale(self._control.rate(completed))
        if self._trace.is_due(completed):
            with self._clock.pause("trace"), self.crew.watch.phase("finish"):
                self._trace.before(completed)

    def _enter(self, phase: str) -> None:
        self.crew.watch.enter(phase)
        self._trace.enter(phase)

    def _is_over(self) -> bool:
        """Whether a callback asks for the end: only the first process calls any."""
        if not self._callbacks.functions:
            return False
        return self.crew.share("over", self._callbacks.is_over)

    def _new_alarm(self) -> Alarm:
        """Begins to judge the losses from `start` on."""
        followed, settle = self.assessment.followed, self._finish_saves
        return Alarm(
            self.engine, self.directory, self.console, followed, self.progress, self.start, settle
        )

    def _count(self, values: dict[str, float], waited: float, at: float) -> None:
        """Counts one more completed step: its metrics, its wait for data, and when it was complete."""
        number = loaders.number(self._counted, self.rewinds.skips)
        self._counted += 1
        work = self._work[self.engine.pace.phase(number)]
        self._clock.add(tokens=values["tokens"], data_wait_seconds=waited, at=at, work=work)
        self.alarm.train(self._counted, values)
        for name in count_sources(self.engine, number, self.progress.read):
            self._journal.note_ended(self._counted, name)

    def _log(self, step: int, values: dict[str, float]) -> None:
        beside: dict[str, Any] = self._clock.read(step) | {"tokens": self.progress.tokens}
        beside |= self.alarm.mark
        beside |= source_metrics(self.engine, step, self.progress.read, self.rewinds.skips)
        beside["peak_bytes"] = host_memory.peak(jax.local_devices()).bytes
        if self._step.watching is not None:
            beside |= self._step.watching.take(step)
        self._journal.log(step, values, beside)

    def _note_damage(self, text: str) -> None:
        self.console.warn(text, step=self._step.completed)

    def _rewind(self, spent: BudgetSpent) -> None:
        """Goes back to a healthy checkpoint and around the batches about the first bad one; ends the run where that was done often enough.

        Raises:
          Diverged: where no rewind is left.
        """
        self._saves.abandon()
        note = functools.partial(self.console.warn, step=spent.step)
        rewind = self.rewinds.rewind(spent, self.store, self.run.guard, note)
        self._journal.note_rewind(spent, rewind)
        self._take_up(self.store.record(rewind.to).meta if rewind.to else None)
        self.alarm = self._new_alarm()
        self._journal.open(self.start)

    def _evaluate(self, state: TrainState, step: int) -> float | None:
        """Every validation set; the loss of the one followed that ranks checkpoints."""
        with self._clock.pause("eval"), self.crew.watch.phase("eval"):
            faults.point("eval", step)
            self.evaluation, ranked = self.assessment.evaluate(state, step, self.alarm.evaluated)
        self.alarm.conclude(step, self.evaluation["loss_nats"])
        return ranked

    def _sample(self, state: TrainState, step: int) -> None:
        with self._clock.pause("sample"), self.crew.watch.phase("eval"):
            self.assessment.sample(state, step)

    def _save(self, state: TrainState, step: int, loss_nats: float | None) -> None:
        """Saves, once what happened before is on disk."""
        with self._clock.pause("save"), self.crew.watch.phase("save"):
            self._journal.flush()
            self._saves.save(SaveRequest(step, state, self.progress, self.evaluation, loss_nats))

    def _finish_saves(self) -> None:
        with self.crew.watch.phase("save"):
            self._saves.finish()


def _rank_together(before: dict[str, Any], now: EvalConfig) -> bool:
    """Whether losses of before, by the JSON of the section, are of the same rows as those to come."""
    is_same_set = before.get("follow", "auto") == now.follow
    if before["batches"] == now.batches == "all":
        return is_same_set
    return is_same_set and (before["batches"], before["batch"]) == (now.batches, now.batch)
