"""Handing states to the store, and trying once more where it failed."""

import dataclasses
import math
import shutil
from collections.abc import Callable
from typing import Any

from jaxlm.checkpoint.store import Store
from jaxlm.core import config, faults, tree
from jaxlm.core.errors import DataError, Diverged, NotWritable, SaveFailed
from jaxlm.data import loader
from jaxlm.monitor import formatting
from jaxlm.monitor.console import Console
from jaxlm.recipes.config import Run
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.training import guard
from jaxlm.training import guard as guards
from jaxlm.training.config import GuardConfig
from jaxlm.training.control import Control
from jaxlm.training.loop import BudgetSpent, Progress
from jaxlm.training.processes import ProcessGroup
from jaxlm.training.rundir import RunDir, read_json
from jaxlm.training.state import TrainState

# Going back to a healthy checkpoint and around the batches that spoilt the run.


FILE = "rewinds.json"


@dataclasses.dataclass(frozen=True)
class Rewind:
    """One return to an earlier step. `low` to `high` are the batches left out since, by their number in the stream."""

    first_bad: int
    to: int
    low: int
    high: int


class Rewinds:
    """The rewinds of a run, the newest last; on disk before anything follows from them."""

    def __init__(self, directory: RunDir):
        self._directory = directory
        found = read_json(directory.path, FILE) if (directory.path / FILE).exists() else []
        self.made = [Rewind(**values) for values in found]

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """The ranges of batches that are left out, as disjoint ranges."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted((rewind.low, rewind.high) for rewind in self.made):
            if low == high:
                continue
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        return tuple(merged)

    def as_json(self) -> list[dict[str, Any]]:
        """What is stored, here and in each checkpoint."""
        return [dataclasses.asdict(rewind) for rewind in self.made]

    def rewind(
        self,
        spent: BudgetSpent,
        store: Store,
        guard: GuardConfig,
        note: Callable[[str], None] = lambda text: None,
    ) -> Rewind:
        """One rewind more, from what could not be got over. The first process chooses it for all.

        `note` gets a line for each checkpoint that was damaged and had to be passed over.

        Raises:
          Diverged: where none is left.
          DataError: if the checkpoint that the run began with is damaged, and no other is left.
        """
        made = len(self.made)
        if made >= guard.rewinds:
            rate = spent.values["learning_rate"]
            raise Diverged(
                f"training cannot go on after step {spent.first - 1}, and {made} rewinds are used up",
                where=f"steps {spent.first} to {spent.step}; spikes.jsonl names their documents",
                why=f"{guards.words(int(spent.values['verdict']))}: loss {spent.values['loss_nats']:.4g}, "
                f"gradient norm {spent.values['grad_norm']:.4g}, learning rate {rate:.3g}",
                fix=f"--config.optim.lr={rate / 3:.1e} --workdir=runs/another",
            )
        values = store.verifier.decide(
            lambda: dataclasses.asdict(self.add(spent.first, store, guard, note))
        )
        if not self._directory.is_writer:
            self.made.append(Rewind(**values))
        return self.made[made]

    def add(
        self,
        first_bad: int,
        store: Store,
        guard: GuardConfig,
        note: Callable[[str], None] = lambda text: None,
    ) -> Rewind:
        """Chooses where to go back to and what to leave out, and makes it last: later steps go to the quarantine.

        The way back leads to the newest healthy checkpoint at least `guard.reach` steps before the first bad one; where
        there is none, to the oldest that is healthy, or to the beginning. Only the step that is chosen is verified; if it is
        damaged, it goes to the quarantine too, and the next one is chosen.
        """
        to, damaged = self._target(first_bad, store, guard)
        bad = loader.number(first_bad - 1, self.skips)
        low = max(bad - guard.skip // 2, loader.number(to, self.skips))
        rewind = Rewind(first_bad, to, low, low + guard.skip)
        self.made.append(rewind)
        self._directory.write_json(FILE, self.as_json())
        faults.point("rewind", first_bad)
        reasons = {step: "\n".join(lines) for step, lines in damaged.items()}
        for step, reason in (self.abandoned_steps(store) | reasons).items():
            place = store.quarantine(step, reason)
            if step in damaged:
                note(f"checkpoint {step} is damaged ({damaged[step][0]}); it is in {place}")
        return rewind

    def _target(
        self, first_bad: int, store: Store, guard: GuardConfig
    ) -> tuple[int, dict[int, list[str]]]:
        """The step to go back to, 0 for the beginning, and what is wrong with those that would have come first."""
        healthy = [step for step in store.steps() if step < first_bad and _is_healthy(store, step)]
        damaged: dict[int, list[str]] = {}
        while healthy:
            far = [step for step in healthy if step <= first_bad - guard.reach]
            to = far[-1] if far else healthy[0]
            if not (lines := store.problems(to)):
                return to, damaged
            damaged[to] = lines
            healthy.remove(to)
        if 0 in store.steps():
            lines = damaged.get(0) or store.problems(0)
            raise DataError(
                "a rewind has no checkpoint to go back to",
                where=str(store.directory / "0"),
                why=f"the run began with its weights, and it is damaged: {lines[0]}",
                fix="start again from the same --init_from in another --workdir; command.sh has the flags",
            )
        return 0, damaged

    def abandoned_steps(self, store: Store) -> dict[int, str]:
        """The steps of a future that was given up, each with why; some are left where the process died before it moved them."""
        found: dict[int, str] = {}
        if not self.made:
            return found
        for step in store.steps():
            try:
                known = len(store.record(step).meta["rewinds"])
            except DataError:
                continue  # damaged: for the store to deal with
            if step > self.made[-1].to and known < len(self.made):
                found[step] = f"given up by the rewind to {self.made[-1].to}"
        return found


def _is_healthy(store: Store, step: int) -> bool:
    """Whether a step may be gone back to, by its record: nothing was skipped shortly before it."""
    try:
        return store.record(step).healthy
    except DataError:
        return False  # for the next start to deal with


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """A state, and what the host knows at its step."""

    step: int
    state: TrainState
    progress: Progress
    evaluation: dict[str, Any] | None
    loss_nats: float | None  # where this very step was evaluated


class CheckpointSaver:
    """The saves of a run, one at a time in the background."""

    def __init__(
        self,
        engine: TrainPrograms,
        crew: ProcessGroup,
        directory: RunDir,
        console: Console,
        store: Store,
        rewinds: Rewinds,
        control: Control,
    ):
        self._engine, self._crew, self._directory = engine, crew, directory
        self._console, self._store, self._rewinds = console, store, rewinds
        self._control = control
        self._failed = 0  # in a row
        self._is_in_flight = False
        self._newest: SaveRequest | None = None
        self.is_retry_due = False

    def save(self, moment: SaveRequest) -> None:
        """Hands a state to the store. Returns once it may be donated.

        Raises:
          BudgetSpent: where a parameter is not finite: such a state is never committed.
          SaveFailed: where the save before this one failed, and the one before that.
        """
        step, state = moment.step, moment.state
        if not self._engine.is_finite((state.params, state.opt_state)):
            values = {
                "verdict": float(guard.STATE_NOT_FINITE),
                "learning_rate": self._engine.run.optim.lr,
            }
            unknown = dict.fromkeys(("loss_nats", "grad_norm"), float("nan"))
            raise BudgetSpent(step, step, values | unknown)
        self.wait()
        self._newest, self.is_retry_due = moment, False
        last, budget = moment.progress.last_skipped, self._engine.run.guard.budget
        try:
            self._is_in_flight = True
            self._store.save(
                step,
                state,
                self._meta(moment),
                loss_nats=moment.loss_nats,
                healthy=last is None or step - last > budget,
            )
        except SaveFailed as error:  # it could not even begin
            self._count(error)
        self._directory.step = step

    def check(self) -> None:
        """Once a step: where a save has failed, the next state is due to be saved instead."""
        try:
            self._store.check()
        except SaveFailed as error:
            self._count(error)

    def finish(self) -> None:
        """Returns when the newest save is committed, tried once more if need be."""
        self.wait()
        if self.is_retry_due:
            assert self._newest is not None
            # If only the removal of an older step failed, this one is there.
            if self._newest.step not in self._store.steps():
                self.save(self._newest)  # no step came after it, so its buffers are still there
            self._store.wait()

    def abandon(self) -> None:
        """Before a rewind: waits for the save in flight, and asks for no other. The state that it was of is given up."""
        self.wait()
        self._newest, self.is_retry_due = None, False

    def wait(self) -> None:
        """Waits for the save in flight, and notes how it went: on a full disk what a failed one took up is free then.

        Raises:
          SaveFailed: where it failed, and the one before it.
        """
        try:
            self._store.wait()
        except SaveFailed as error:
            self._count(error)
            return
        if self._is_in_flight:
            self._is_in_flight, self._failed = False, 0

    def _meta(self, moment: SaveRequest) -> dict[str, Any]:
        run, progress = self._engine.run, moment.progress
        patience = run.train.patience
        stopped_early = patience is not None and progress.evaluations_without_gain >= patience
        return {
            "step": moment.step,
            "finished": moment.step == run.train.steps or stopped_early,
            "config": config.to_json(run),
            "data": self._engine.data.fingerprint,
            "progress": dataclasses.asdict(progress),
            "evaluation": moment.evaluation,
            "rewinds": self._rewinds.as_json(),
            "control": self._control.as_json(moment.step),
        }

    def _count(self, error: SaveFailed) -> None:
        """Frees what a failed save took up; a second one in a row ends the run. So does the first where there are peers:
        one process alone cannot save again, and all can start again.
        """
        self._failed, self._is_in_flight, self.is_retry_due = self._failed + 1, False, True
        if self._directory.is_writer:
            self._store.remove_torn()
        if self._failed > 1 or self._crew.peers.count > 1:
            raise error
        self._console.warn(f"{error}\ntrying once more", step=self._directory.step)


# Whether the checkpoints of a run will fit on the disk.


def check_disk_space(engine: TrainPrograms, committed: int, directory: RunDir) -> None:
    """Compares what the kept steps, and one more while it is written, will take with what is free.

    So many steps of the run are `committed` already. The arrays are counted as they are; compression saves a little of it.

    Raises:
      NotWritable: where they do not fit, with both numbers.
    """
    config = engine.run.checkpoint
    if config.space == "ignore":
        return
    one = tree.size_bytes(engine.shapes)
    way_back = 2  # healthy steps: one to rewind to, and one that will be
    kept = config.keep_last + config.keep_best + _permanent_steps(engine.run) + way_back
    missing = max(kept + 1 - committed, 1)
    free = shutil.disk_usage(directory.path).free
    if missing * one > free:
        fewer = max(missing - (config.keep_last - 1), 1)
        fits = (
            "--config.checkpoint.keep_last=1\n"
            if config.keep_last > 1 and fewer * one <= free
            else ""
        )
        raise NotWritable(
            "the checkpoints of this run will not fit on the disk",
            where=str(directory.checkpoints),
            why=f"{missing} more of {formatting.size(one)} need {formatting.size(missing * one)}, and {formatting.size(free)} are free",
            fix=f"{fits}--config.checkpoint.space=ignore    # trains until the disk is full",
        )


def _permanent_steps(run: Run) -> int:
    """Steps of the permanent ladder: the saved ones that are its multiples. Which a cadence in time saves, nobody knows."""
    every, saved = run.checkpoint.keep_every, run.checkpoint.every
    if every is None or saved.unit == "second":
        return 0
    apart = saved.steps(run.train.steps, run.pace)
    return run.train.steps // math.lcm(every, apart) if apart else 0
