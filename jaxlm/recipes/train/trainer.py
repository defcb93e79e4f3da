"""The trainer: state, step, evaluation, saves, records and rewinds of a run."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jaxlm.core import backend, config, faults
from jaxlm.core.batch_schedule import Phase
from jaxlm.core.callbacks import Event
from jaxlm.core.errors import Preempted
from jaxlm.core.span import Span
from jaxlm.data import loader
from jaxlm.data.baselines import unigram_of
from jaxlm.data.mixture import MixtureLoader
from jaxlm.generate.sampler import Sampler
from jaxlm.models.cost import model_cost
from jaxlm.monitor import chips, host_machine, sinks
from jaxlm.monitor.clock import Clock
from jaxlm.monitor.profiling import Trace
from jaxlm.optim.average_config import NoAverage, first_averaged_update
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import oom
from jaxlm.recipes.train import checkpointing
from jaxlm.recipes.train.api import ResumeOptions, RunContext
from jaxlm.recipes.train.checkpointing import CheckpointSaver, SaveRequest
from jaxlm.recipes.train.programs import CompiledStep, Skips, TrainPrograms, compiled_memory
from jaxlm.recipes.train.records import MetricsLogger
from jaxlm.recipes.train.resume import ResumePoint
from jaxlm.recipes.train.rollouts import Rollouts
from jaxlm.recipes.train.task_scores import SPLIT, TaskScores
from jaxlm.recipes.use.load import InitSource, recorded_start
from jaxlm.training import control
from jaxlm.training.cadence import Cadence
from jaxlm.training.control import Control
from jaxlm.training.divergence import Divergence
from jaxlm.training.divergence_alarm import AlarmTerms, DivergenceAlarm
from jaxlm.training.loop import BudgetSpent, LoopLimits, Progress, TrainLoop
from jaxlm.training.signals import StopRequest
from jaxlm.training.state import TrainState
from jaxlm.tune import cost
from jaxlm.tune.config import Full


class Trainer(TrainLoop):
    """Trains a run: owns its state, step, clock, evaluator, saver and records.

    `source` is the run whose weights a new run starts from; None for fresh weights.
    """

    def __init__(
        self,
        context: RunContext,
        programs: TrainPrograms,
        point: ResumePoint,
        source: InitSource | None = None,
    ):
        run, directory = context.run, context.directory
        self.context, self.programs, self.run_config = context, programs, run
        self.changes = point.changes
        self._resume(point.meta)
        self._first_step, self._source = self.start, source
        context.processes.watch.details["data"] = (
            f"reading {', '.join(run.data.train)} from {programs.data.train.shards.folder}"
        )
        self._logger = MetricsLogger(context, programs, self._warn)
        self.evaluator = Evaluator(programs, self._logger)
        self.rollouts = None
        if run.objective.samples_answers:
            self.rollouts = Rollouts(context, programs, self._logger.note_rollout)
            programs.held_out = self.rollouts.evaluate
        self.tasks = TaskScores(context, programs) if context.run.eval.tasks else None
        self.alarm = self._new_alarm()
        self._trace = Trace(  # one for each process
            run.profile,
            directory.path / "profile",
            lambda: self._logger.summarize_trace(self._trace.folder, self._program),
        )
        self._program: jax.stages.Compiled | None = None
        self._logged: dict[str, Any] = {}  # the newest record of a step
        self._batch: Any = None
        self._compiled: set[str] = set()  # programs of pauses that have run
        self._flops_by_phase = flops_by_phase(programs)
        self.forecast = oom.forecast_here(run, programs.model.blueprint.config)
        self._step = CompiledStep(
            context,
            programs,
            self.forecast,
            self._on_compiled,
            lambda: self._clock.pause("compile"),
        )
        changes = control.load_changes(directory.path, point.meta or {}, context.processes.share)
        self._control = Control(directory, run.optim.lr, changes, context.console.say)
        self._has_other_lr = any(each.path == "optim.lr" for each in point.changes)
        self._saver = CheckpointSaver(context, programs, self._control)
        directory.make_room = self._saver.wait

    def train(self, stop: StopRequest, stop_at: int | None) -> None:
        """Create or restore the state and run the loop; rewind if the guard's budget is spent."""
        self._stop = stop
        with contextlib.closing(self._logger), contextlib.closing(self._trace):
            self._logger.open(self.start)
            if self._has_other_lr and (line := self._control.overridden(self.start)):
                self.context.console.warn(line, step=self.start)
            while True:
                try:
                    with oom.explain_oom(self.run_config, self.forecast):
                        state = self._train_from(self._state(), stop, stop_at)
                    break
                except Preempted:
                    self._finish_saves()  # before the error reports that the step is saved
                    self.context.callbacks.fail()
                    raise
                except BudgetSpent as spent:
                    self._rewind(spent)
            with self.context.processes.watch.phase("save"):
                self._saver.finish()
                self.context.store.close()
            self.observe("on_end", state, self._counted, self._batch)
        self.context.callbacks.fail()

    def _resume(self, meta: dict[str, Any] | None) -> None:
        """Set the host's counters to those of a checkpoint; None sets them to the start."""
        self.start: int = meta["step"] if meta else 0
        self.progress = Progress(**meta["progress"]) if meta else Progress()
        if meta and not self._can_rank_with(config.from_json(Run, meta["config"])):
            self.progress.forget()
        if meta:
            is_same = _training_data(meta["data"]) == _training_data(self.programs.data.fingerprint)
            self.progress.lost = [(*each,) for each in self.progress.lost if is_same]
        self.evaluation: dict[str, Any] | None = meta["evaluation"] if meta else None
        self.context.directory.step = self._counted = self.start

    def _can_rank_with(self, before: Run) -> bool:
        """Return whether losses of the run as it was are of the same rows as later ones."""
        is_same_set = before.eval.follow == self.run_config.eval.follow
        rows = [self.programs.evaluated(run) for run in (before, self.run_config)]
        return is_same_set and rows[0] == rows[1]

    def _state(self) -> TrainState:
        """Return the state before the next step."""
        watch, console = self.context.processes.watch, self.context.console
        if self._source is not None and not self.context.store.steps():
            with watch.phase("save"), console.timer(f"restoring {self._source.trained}"):
                state = checkpointing.state_from(self.programs, self._source)
            if self.evaluator.ranking_set:  # the same sets as later
                with watch.phase("eval"), console.timer(f"evaluating {self._source.trained}"):
                    self.evaluation, _ = self.evaluator.evaluate(state, 0)
                    self._compiled.add("evaluation")
            with watch.phase("save"), console.timer("saving the initial state"):
                self._logger.flush()
                self._saver.save(SaveRequest(0, state, self.progress, self.evaluation, None))
                self._saver.finish()
                return state
        if not self.start:
            return checkpointing.first_state(self.programs, self.context.store)
        # After a rewind, a checkpoint of this start is restored as it is.
        is_earlier = self.start <= self._first_step
        options = self.context.options.resume if is_earlier else ResumeOptions()
        with watch.phase("save"), console.timer(f"restoring step {self.start}"):
            return checkpointing.restored_state(
                self.programs, self.context.store, self.start, options
            )

    def _train_from(self, state: TrainState, stop: StopRequest, stop_at: int | None) -> TrainState:
        run = self.run_config
        self._log_cadence, self._save_cadence = self._cadence("log"), self._cadence("checkpoint")
        self._eval_cadence, self._sample_cadence = self._cadence("eval"), self._cadence("sample")
        self._task_cadence = self._cadence("tasks", run.eval.tasks_every)
        self._control_cadence = self._cadence("control", run.train.control)
        self._clock = build_clock(self.programs, self.start)
        limits = LoopLimits(
            start=self.start,
            steps=run.train.steps,
            stop_at=min(stop_at or run.train.steps, run.train.steps),
            patience=run.train.patience,
            keep_best=run.checkpoint.keep_best > 0,
            budget=run.guard.budget,
            resume_command=self.context.options.resume_command,
        )
        skips = self.context.rewinds.skips
        if self.rollouts is not None:
            step = self.rollouts.following(self._step, state)
            return self.run(step, state, self.rollouts.batches(self.start, skips), limits, stop)
        gather = functools.partial(self.context.processes.gather, "lost pieces", phase="data")
        batches = self.programs.batches(self.start, skips, self._warn, self.progress.lost, gather)
        return self.run(self._step, state, batches, limits, stop)

    def _cadence(self, name: str, span: Span | None = None) -> Cadence:
        """Return the cadence of a section's `every`, or of a span, the same on all processes."""
        run = self.run_config
        return Cadence(
            getattr(run, name).every if span is None else span,
            total=run.train.steps,
            tokens_per_step=run.pace if run.train.batch_warmup else run.tokens_per_step,
            share=self.context.processes.sharer(f"cadence/{name}"),
        )

    def _on_compiled(self, step: jax.stages.Compiled) -> None:
        """Check the memory of a compiled step. The clock starts again with the first one."""
        is_first, self._program = self._program is None, step
        memory = compiled_memory(step)
        self._logger.note_memory(self.forecast, memory)
        oom.check(self.run_config, self.forecast, memory["total"])
        if is_first:
            self._clock = build_clock(self.programs, self.start)

    # The loop calls these.

    def is_log_due(self, step: int) -> bool:
        """Return whether the metrics of a step are logged."""
        return self._log_cadence.is_due(step)

    def is_eval_due(self, step: int) -> bool:
        """Return whether the validation sets are evaluated after a step."""
        return bool(self.evaluator.ranking_set) and self._eval_cadence.is_due(step)

    def is_sample_due(self, step: int) -> bool:
        """Return whether samples are written after a step."""
        return self.evaluator.has_samples and self._sample_cadence.is_due(step)

    def is_task_due(self, step: int) -> bool:
        """Return whether tasks are scored after a step."""
        return self.tasks is not None and self._task_cadence.is_due(step)

    def is_save_due(self, step: int) -> bool:
        """Return whether a checkpoint is saved after a step, also to retry a failed save."""
        return self._save_cadence.is_due(step) or self._saver.is_retry_due

    def before_step(self, completed: int) -> None:
        """Apply live control and start a trace before a step."""
        self._step.completed = completed
        self.context.console.advance(completed)
        if self._control_cadence.is_due(completed):
            share = functools.partial(self.context.processes.share, "control")
            self._control.poll(completed, share)
        self._step.set_lr_scale(self._control.lr_scale(completed))
        if self._trace.is_due(completed):
            with self._clock.pause("trace"), self.context.processes.watch.phase("finish"):
                self._trace.before(completed)

    def enter(self, phase: str) -> None:
        """Report the phase to the watchdog and the trace."""
        self.context.processes.watch.enter(phase)
        self._trace.enter(phase)

    def is_over(self) -> bool:
        """Return whether a callback ended the run."""
        callbacks = self.context.callbacks  # those of the first process decide
        if not (callbacks.functions or callbacks.observers):
            return False
        processes, is_over = self.context.processes, callbacks.is_over
        if callbacks.error is not None and processes.peers.count > 1:
            # Any process may have the error: all stop as after a signal.
            self._stop.reason, is_over = self._stop.reason or "an error of a callback", False
        return bool(processes.share("over", is_over))

    def is_observed(self, moment: str) -> bool:
        """Return whether a callback is called at a moment."""
        return self.context.callbacks.is_observed(moment)

    def observe(self, moment: str, state: TrainState, step: int, batch: Any) -> None:
        """Call the callbacks of a moment."""
        self._batch, callbacks = batch, self.context.callbacks
        if moment == "on_log" and self._logged.get("step") != step:
            return
        if not callbacks.is_observed(moment):
            return
        event = Event(
            step=step,
            state=state,
            metrics=dict(self._logged if moment == "on_log" else self.evaluation or {}),
            batch=batch,
            workdir=self.context.directory.path,
            whole=self.programs.whole,
            merge=self.programs.model.blueprint.merge,
        )
        with self._clock.pause("callback"), self.context.processes.watch.phase("eval"):
            callbacks.observe(moment, event)

    def count(
        self, values: dict[str, float], data_wait_seconds: float, begun_at: float, done_at: float
    ) -> None:
        """Count a completed step: time, tokens, sources, and its verdict on the loss."""
        number = loader.batch_number(self._counted, self.context.rewinds.skips)
        self._counted += 1
        phase = self.programs.pace.phase(number)
        filled = values["tokens_read"] / (phase.rows * self.run_config.data.sequence)
        self._clock.add(
            tokens=values["tokens_read"],
            data_wait_seconds=data_wait_seconds,
            begun_at=begun_at,
            completed_at=done_at,
            work=tuple(filled * share for share in self._flops_by_phase[phase]),
        )
        self.alarm.judge_training(self._counted, values)
        for name in count_sources(self.programs, number, self.progress.read):
            self._logger.note_exhausted(self._counted, name)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log the metrics of a step, with speed, memory and layer statistics."""
        measured: dict[str, Any] = self._clock.read(step) | {"tokens": self.progress.tokens}
        trained = measured.pop("train_seconds")
        measured |= self.alarm.training_mark
        skips = self.context.rewinds.skips
        measured |= source_metrics(self.programs, step, self.progress.read, skips)
        measured["peak_bytes"] = host_machine.peak_memory(jax.local_devices()).bytes
        if self.rollouts is not None:
            measured |= self.rollouts.take(step) | {"train_seconds": trained}
        if self._step.layer_stats is not None:
            measured |= self._step.layer_stats.take(step)
        self._logged = self._logger.log(step, values, measured)

    def note_skipped(self, step: int, values: dict[str, float], layers: Any) -> None:
        """Record a step that the guard did not apply."""
        self._logger.note_skipped(step, values, layers)

    def evaluate(self, state: TrainState, step: int) -> float | None:
        """Evaluate all validation sets and return the loss that ranks checkpoints."""
        self._note_compiling("evaluation")
        with self._clock.pause("eval"), self.context.processes.watch.phase("eval"):
            faults.point("eval", step)
            judge = self.alarm.judge_evaluation
            with released_memory():
                self.evaluation, ranking_loss = self.evaluator.evaluate(state, step, judge)
        self.alarm.report_evaluation(step, self.evaluation["loss_nats"])
        return ranking_loss

    def sample(self, state: TrainState, step: int) -> None:
        """Write samples after the prompts of the config."""
        self._note_compiling("sampler")
        with self._clock.pause("sample"), self.context.processes.watch.phase("eval"):
            self.evaluator.sample(state, step)

    def _note_compiling(self, program: str) -> None:
        """Print that a program is compiled, before it first runs."""
        if program not in self._compiled:
            self._compiled.add(program)
            self.context.console.say(f"compiling the {program} ...")

    def score_tasks(self, state: TrainState, step: int) -> None:
        """Score the tasks of the config, and record their means and intervals."""
        assert self.tasks is not None
        with self._clock.pause("tasks"), self.context.processes.watch.phase("eval"):
            self._logger.write(step, SPLIT, self.tasks.score(state, step))

    def save(self, state: TrainState, step: int, loss_nats: float | None) -> None:
        """Flush all records, then save a checkpoint in the background."""
        with self._clock.pause("save"), self.context.processes.watch.phase("save"):
            self._logger.flush()  # records of earlier steps are on the disk before the checkpoint
            if self.rollouts is not None:
                self.rollouts.keep(step, self.context.rewinds.skips)
            request = SaveRequest(step, state, self.progress, self.evaluation, loss_nats)
            self._saver.save(request)

    def check_saves(self) -> None:
        """Raise SaveFailed if a save in the background failed."""
        self._saver.check()

    def _finish_saves(self) -> None:
        with self.context.processes.watch.phase("save"):
            self._saver.finish()

    def _rewind(self, spent: BudgetSpent) -> None:
        """Return to a healthy checkpoint, without the batches around the first bad one.

        Raises Diverged if no rewind is left.
        """
        self._saver.abandon()
        warn = functools.partial(self.context.console.warn, step=spent.step)
        store, guard = self.context.store, self.run_config.guard
        rewind = self.context.rewinds.rewind(spent, store, guard, warn)
        self._logger.note_rewind(spent, rewind)
        self._resume(store.record(rewind.to).meta if rewind.to else None)
        self.alarm = self._new_alarm()
        self._logger.open(self.start)
        if self._step.layer_stats is not None:
            records = sinks.read(self.context.directory.path / "metrics.jsonl")
            self._step.layer_stats.continue_from(records)

    def _new_alarm(self) -> DivergenceAlarm:
        run, data, progress = self.run_config, self.programs.data, self.progress
        ids, ranking_set = data.tokenizer.size, self.evaluator.ranking_set
        init_from = self.context.options.init_from
        if init_from is None and not isinstance(run.tune, Full):
            init_from = recorded_start(self.context.directory.path)
        terms = AlarmTerms(
            ids=ids,
            rate=run.optim.lr,
            ranking_set=ranking_set or "train",
            init_from=init_from,
            guard=run.guard,
        )
        divergence = None
        # Coders compare with the likelihood of tokens, not with a loss of whole answers.
        if not (run.objective.compares_answers or run.objective.samples_answers):
            uniform, first = math.log(ids), progress.first_loss
            text = data.validation.get(ranking_set or "")
            divergence = Divergence(
                steps=run.train.steps,
                uniform=uniform,
                unigram=functools.cache(functools.partial(unigram_of, data.train, text)),
                # A checkpoint of an earlier version does not have the first loss.
                first=uniform if first is None and self.start else first,
                best=math.inf if progress.best_loss is None else progress.best_loss,
                worse=progress.divergence["worse_than"] if progress.divergence else None,
            )
            if progress.judged is not None:
                divergence.restore(progress.judged)
        context = self.context
        return DivergenceAlarm(
            divergence, terms, progress, context.directory, context.console, self._finish_saves
        )

    def _warn(self, text: str) -> None:
        self.context.console.warn(text, step=self._step.completed)


@contextlib.contextmanager
def released_memory() -> Iterator[None]:
    """Return memory that a CPU's programs freed to the system, before the block and after it.

    So the step and an evaluation between two steps do not both count in the peak.
    """
    is_cpu = backend.name() == "cpu"
    if is_cpu:
        backend.release_freed_memory()
    yield
    if is_cpu:
        backend.release_freed_memory()


class Evaluator:
    """Evaluations and samples of a run between its steps.

    Attributes:
      ranking_set: the validation set whose loss ranks checkpoints; None without one.
      has_samples: whether the run writes samples.

    Raises ConfigError if `eval.follow` names a set that does not exist, or prompts do not fit the
    positions of the model.
    """

    def __init__(self, programs: TrainPrograms, logger: MetricsLogger):
        run = programs.run
        self._programs, self._logger = programs, logger
        self.ranking_set = setup.ranking_set(run, programs.data.validation)
        self.has_samples = bool(run.sample.prompts) and run.objective.prompts != "none"
        blueprint, self._decoded = setup.decoding(programs.model)
        self._sampler = None
        if self.has_samples:
            self._sampler = Sampler(
                dataclasses.replace(run.sample.request, seed=(run.seed,)),
                blueprint,
                programs.data.tokenizer,
                both_ways=run.objective.prompts == "both ways",
                is_scored=True,
            )

    def evaluate(
        self,
        state: TrainState,
        step: int,
        judge: Callable[[int, float], dict[str, Any]] = lambda step, loss: {},
    ) -> tuple[dict[str, Any], float]:
        """Return the figures of the ranking set, and the loss that ranks this step.

        Figures of all sets are recorded, those of the average as SET.ema or SET.swa. At the start
        and the end of the run they are of whole sets, else of `eval.batches`. The ranking loss is
        always of `eval.batches`; where the recorded loss is not, it is recorded as
        `ranking_loss_nats`. `judge` is the function (step, loss) -> further fields of the ranking
        set's record.
        """
        run, programs = self._programs.run, self._programs
        partial = run.evaluated_batches
        assert self.ranking_set is not None  # else no evaluation is due
        limit = None if step in (0, run.train.steps) else partial
        results = ranked = programs.evaluate(state.params, limit=limit)
        if limit != partial and step and not programs.evaluates_all(self.ranking_set):
            ranked = programs.evaluate(state.params, limit=partial)
            ranking_loss = ranked[self.ranking_set]["loss_nats"]
            results[self.ranking_set] = results[self.ranking_set] | {
                "ranking_loss_nats": ranking_loss
            }
        average = run.average
        if not isinstance(average, NoAverage) and step >= first_averaged_update(
            average, run.train.steps, run.pace
        ):
            averaged = programs.evaluate(programs.averaged(state), limit=limit)
            results |= {f"{name}.{average.name}": record for name, record in averaged.items()}
        for name, record in results.items():
            fields = judge(step, record["loss_nats"]) if name == self.ranking_set else {}
            self._logger.write(step, name, record | fields)
        return results[self.ranking_set] | {"step": step}, ranked[self.ranking_set]["loss_nats"]

    def sample(self, state: TrainState, step: int) -> None:
        """Write a continuation of each prompt."""
        assert self._sampler is not None  # else no samples are due
        params = self._decoded(self._programs.whole(state.params))
        self._logger.note_samples(step, self._sampler.write(params))


def _training_data(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a fingerprint that determines the pieces of documents in rows."""
    return {name: each for name, each in fingerprint.items() if not name.startswith("validation.")}


def build_clock(programs: TrainPrograms, start: int) -> Clock:
    """Return the clock of the steps after `start` completed ones."""
    run = programs.run
    half, full = flops_per_token(programs, run.data.sequence)
    kinds = [device.device_kind for device in programs.model.mesh.devices.flat]
    return Clock(
        start=start,
        steps=run.train.steps,
        flops_per_step=half * run.tokens_per_step,
        flops_per_step_full=full * run.tokens_per_step,
        peak_flops=chips.peak_flops(kinds[0], len(kinds)),
    )


def flops_by_phase(programs: TrainPrograms) -> dict[Phase, tuple[float, ...]]:
    """Return model FLOPs of a step in each phase over those in the last, by both conventions."""

    def flops(phase: Phase) -> list[float]:
        return [each * phase.rows for each in flops_per_token(programs, phase.length)]

    phases = programs.pace.phases
    last = flops(phases[-1])
    return {
        phase: tuple(part / whole for part, whole in zip(flops(phase), last, strict=True))
        for phase in phases
    }


def flops_per_token(programs: TrainPrograms, length: int) -> tuple[float, float]:
    """Return model FLOPs of a token with attention at its causal half, and in full."""
    model, targets, run = programs.model.blueprint.config, programs.targets, programs.run
    has_logits = not run.objective.has_reward_head
    unread = (1 - run.scored_share) * model.vocab * model.width
    multiplied = model_cost.matmul_parameters_per_token(
        model, length, targets, has_logits=has_logits
    )
    more = cost.more_flops(run.tune, model, multiplied - unread) - 6 * unread
    half, full = (
        model_cost.flops_per_token(
            model, length, causal=causal, targets=targets, has_logits=has_logits
        )
        for causal in (True, False)
    )
    return half + more, full + more


def count_sources(programs: TrainPrograms, number: int, read: dict[str, list[int]]) -> list[str]:
    """Add rows and tokens of a whole batch to the counts by source of a mixture.

    The counts, which change in place, are exact and the same on every host. Return the names of the
    sources that reached their most epochs with this batch.
    """
    train, pace = programs.data.train, programs.pace
    if not isinstance(train, MixtureLoader):
        return []
    first, stop = pace.rows(number), pace.rows(number + 1)
    for name, (rows, tokens) in train.read(first, stop).items():
        before = read.get(name, [0, 0])
        read[name] = [before[0] + rows, before[1] + tokens]
    return list(train.ended(first, stop))


def source_metrics(
    programs: TrainPrograms, step: int, read: dict[str, list[int]], skips: Skips
) -> dict[str, Any]:
    """Return `sources/NAME/rows`, `tokens`, `epochs`, and `weight` of the next row.

    Rows of prompts are prompts. Tokens are those of text, also if an objective predicts only some.
    Batches that a rewind left out are not counted.
    """
    train = programs.data.train
    if not isinstance(train, MixtureLoader):
        return {}
    weights = train.weights_at(programs.pace.rows(loader.batch_number(step, skips)))
    metrics: dict[str, Any] = {}
    for name, source, weight in zip(train.names, train.sources, weights, strict=True):
        rows, tokens = read[name]
        epochs = rows / source.plan.rows
        values = {"rows": rows, "tokens": tokens, "epochs": epochs, "weight": weight}
        metrics |= {f"sources/{name}/{field}": value for field, value in values.items()}
    return metrics
