"""A run while it is trained: its state, what is due when, its clock, and the way back to an earlier step."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxlm.checkpoint.store import Store
from jaxlm.core import config, faults
from jaxlm.core.errors import Preempted
from jaxlm.core.span import Span
from jaxlm.data import loader as loaders
from jaxlm.evals.config import EvalConfig
from jaxlm.monitor import memory
from jaxlm.monitor.console import Console
from jaxlm.monitor.profile import Trace
from jaxlm.recipes import beginning, control, foresight, resume, sources, stepping, timing
from jaxlm.recipes.alarm import Alarm
from jaxlm.recipes.assessment import Assessment
from jaxlm.recipes.beginning import Origin
from jaxlm.recipes.callbacks import Callbacks
from jaxlm.recipes.control import Control
from jaxlm.recipes.crew import Crew
from jaxlm.recipes.engine import Engine
from jaxlm.recipes.journal import Journal
from jaxlm.recipes.resume import Wish
from jaxlm.recipes.rewinding import Rewinds
from jaxlm.recipes.saving import Moment, Saves
from jaxlm.recipes.stepping import Stepper
from jaxlm.train import loop
from jaxlm.train.cadence import Cadence
from jaxlm.train.loop import BudgetSpent, Hooks, Progress
from jaxlm.train.rundir import RunDir
from jaxlm.train.signals import StopRequest
from jaxlm.train.state import TrainState


class Session:
    """A run while it is trained: what the loop's hooks do, and what they share. Its journal writes down what happens."""

    def __init__(
        self,
        engine: Engine,
        crew: Crew,
        directory: RunDir,
        console: Console,
        store: Store,
        rewinds: Rewinds,
        wish: Wish,
        meta: dict[str, Any] | None,
        changes: list[config.Change],
        origin: Origin | None = None,
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
        self._journal = Journal(
            engine, directory, console, rewinds, self._callbacks, self._note_damage
        )
        self.assessment = Assessment(engine, self._journal)
        self.alarm = self._new_alarm()
        # One for each process.
        self._trace = Trace(
            run.profile,
            directory.path / "profile",
            lambda: self._journal.summarise_trace(self._trace.folder, self._program),
        )
        self._program: jax.stages.Compiled | None = None
        self._work = timing.work(engine)
        self.forecast = foresight.own(run, engine.model.blueprint.config)
        self._step = Stepper(
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
        self._saves = Saves(engine, crew, directory, console, store, rewinds, self._control)
        directory.make_room = self._saves.settle

    def train(self, stop: StopRequest, stop_at: int | None) -> None:
        """Makes or restores the state, and runs the loop; goes back and around what the guard could not get over."""
        with contextlib.closing(self._journal), contextlib.closing(self._trace):
            self._journal.open(self.start)
            while True:
                try:
                    with foresight.explained(self.run, self.forecast):
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
                state = beginning.state(self.engine, self._origin)
            if self.assessment.followed:  # what it knew before, on the same sets as after
                with (
                    self.crew.watch.phase("eval"),
                    self.console.timer(f"evaluating {self._origin}"),
                ):
                    self.evaluation, _ = self.assessment.evaluate(state, 0)
            with self.crew.watch.phase("save"), self.console.timer("saving where it begins"):
                self._journal.flush()
                self._saves.save(Moment(0, state, self.progress, self.evaluation, None))
                self._saves.finish()
                return state
        if not self.start:
            return beginning.again(self.engine, self.store)
        # After a rewind: a checkpoint of this very start is taken up as it is.
        wish = self.wish if self.start <= self._begun_at else Wish()
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
        self._clock = timing.clock(self.engine, self.start)
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
        held = stepping.compiled_memory(step)
        self._journal.note_memory(self.forecast, held)
        foresight.check(self.run, self.forecast, held["total"])
        if is_first:
            self._clock = timing.clock(self.engine, self.start)

    def _before(self, completed: int) -> None:
        self._step.completed = completed
        if self._is_control_due(completed):
            self._control.look(completed, functools.partial(self.crew.share, "control"))
        self._step.follow(self._control.rate(completed))
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
        work = self._work[self.engine.pace.stage(number)]
        self._clock.add(tokens=values["tokens"], data_wait_seconds=waited, at=at, work=work)
        self.alarm.train(self._counted, values)
        for name in sources.count(self.engine, number, self.progress.read):
            self._journal.note_ended(self._counted, name)

    def _log(self, step: int, values: dict[str, float]) -> None:
        beside: dict[str, Any] = self._clock.read(step) | {"tokens": self.progress.tokens}
        beside |= self.alarm.mark
        beside |= sources.record(self.engine, step, self.progress.read, self.rewinds.skips)
        beside["peak_bytes"] = memory.peak(jax.local_devices()).bytes
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
        self._saves.give_up()
        note = functools.partial(self.console.warn, step=spent.step)
        rewind = self.rewinds.go_back(spent, self.store, self.run.guard, note)
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
            self._saves.save(Moment(step, state, self.progress, self.evaluation, loss_nats))

    def _finish_saves(self) -> None:
        with self.crew.watch.phase("save"):
            self._saves.finish()


def _rank_together(before: dict[str, Any], now: EvalConfig) -> bool:
    """Whether losses of before, by the JSON of the section, are of the same rows as those to come."""
    is_same_set = before.get("follow", "auto") == now.follow
    if before["batches"] == now.batches == "all":
        return is_same_set
    return is_same_set and (before["batches"], before["batch"]) == (now.batches, now.batch)
