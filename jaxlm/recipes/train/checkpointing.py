"""Checkpoints of a run: restored states, saves with one retry, rewinds, disk space."""

import dataclasses
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.checkpoint.store import Store
from jaxlm.core import config, faults, tree
from jaxlm.core.errors import ANOTHER, DataError, Diverged, NotWritable, SaveFailed
from jaxlm.data import loader
from jaxlm.models.heads import ADDED_HEADS
from jaxlm.monitor import formatting, sinks
from jaxlm.optim import average
from jaxlm.recipes.config import Run
from jaxlm.recipes.train.api import ResumeOptions, RunContext
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.recipes.use.load import InitSource, in_stored_dtypes
from jaxlm.training import guard as guards
from jaxlm.training.config import GuardConfig
from jaxlm.training.control import Control
from jaxlm.training.loop import BudgetSpent, Progress
from jaxlm.training.rundir import RunDir, read_json
from jaxlm.training.state import TrainState

REWINDS_FILE = "rewinds.json"


@dataclasses.dataclass(frozen=True)
class Rewind:
    """One return to a healthy checkpoint, without the batches that damaged the run."""

    first_bad: int  # the first step that was not applied
    to: int  # the step that the run returned to
    low: int  # number in the stream of the first batch that is left out
    high: int  # number of the first batch after those


class Rewinds:
    """The rewinds of a run, newest last. Each is written to disk before the run returns."""

    def __init__(self, directory: RunDir):
        self._directory = directory
        file = directory.path / REWINDS_FILE
        records = read_json(directory.path, REWINDS_FILE) if file.exists() else []
        self.adopt(records)

    def adopt(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Replace the rewinds by recorded ones."""
        self.made = [Rewind(**record) for record in records]

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """Disjoint ranges [low, high) of the batches that are left out."""
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
        """Return the form in which rewinds are stored, also in each checkpoint."""
        return [dataclasses.asdict(rewind) for rewind in self.made]

    def rewind(
        self,
        spent: BudgetSpent,
        store: Store,
        guard: GuardConfig,
        note: Callable[[str], None] = lambda text: None,
    ) -> Rewind:
        """Return one more rewind after steps that could not be applied; the first process chooses.

        `note` gets a line for each damaged checkpoint that is passed over.

        Raises:
          Diverged: if `guard.rewinds` are used up.
          DataError: if the checkpoint that the run began with is damaged, and no other is left.
        """
        made = len(self.made)
        if made >= guard.rewinds:
            rate = spent.values["learning_rate"]
            raise Diverged(
                f"no step after {spent.first - 1} can be applied, and {made} rewinds are used up",
                where=f"steps {spent.first} to {spent.step}; spikes.jsonl names their documents",
                why=f"{guards.describe_verdict(int(spent.values['verdict']))}:"
                f" loss {spent.values['loss_nats']:.4g},"
                f" gradient norm {spent.values['grad_norm']:.4g}, learning rate {rate:.3g}",
                fix=f"--config.optim.lr={rate / 3:.1e} {ANOTHER}",
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
        """Choose the step to return to and the batches to leave out, and quarantine later steps.

        The run returns to the newest healthy checkpoint at least `guard.rewind_steps` steps before
        the first bad one; else to the oldest healthy one, or to the start. Only the chosen step is
        verified. If it is damaged, it is quarantined too, and the next one is chosen.
        """
        to, damaged = self._target(first_bad, store, guard)
        bad = loader.batch_number(first_bad - 1, self.skips)
        low = max(bad - guard.skip // 2, loader.batch_number(to, self.skips))
        rewind = Rewind(first_bad, to, low, low + guard.skip)
        self.made.append(rewind)
        self._directory.write_json(REWINDS_FILE, self.as_json())
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
        """Return the step of the rewind, 0 for the start, and problems of damaged steps."""
        healthy = [step for step in store.steps() if step < first_bad and _is_healthy(store, step)]
        damaged: dict[int, list[str]] = {}
        while healthy:
            far = [step for step in healthy if step <= first_bad - guard.rewind_steps]
            to = far[-1] if far else healthy[0]
            if not (lines := store.problems(to)):
                return to, damaged
            damaged[to] = lines
            healthy.remove(to)
        if 0 in store.steps():
            lines = damaged.get(0) or store.problems(0)
            raise DataError(
                "a rewind has no checkpoint to return to",
                where=str(store.directory / "0"),
                why=f"the checkpoint that the run began with is damaged: {lines[0]}",
                fix="start again from the same --init_from in another --workdir;"
                " command.sh has the flags",
            )
        return 0, damaged

    def abandoned_steps(self, store: Store) -> dict[int, str]:
        """Return the steps that a rewind abandoned, each with the reason.

        Some remain if the process died before it moved them.
        """
        abandoned: dict[int, str] = {}
        if not self.made:
            return abandoned
        for step in store.steps():
            try:
                known = len(store.record(step).meta["rewinds"])
            except DataError:
                continue  # damaged: handled by the store
            if step > self.made[-1].to and known < len(self.made):
                abandoned[step] = f"abandoned by the rewind to {self.made[-1].to}"
        return abandoned


def _is_healthy(store: Store, step: int) -> bool:
    """Return whether, by its record, no step was skipped shortly before a checkpoint."""
    try:
        return store.record(step).healthy
    except DataError:
        return False  # damaged: handled by the next start


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """A state to save, and the host's counters at its step."""

    step: int
    state: TrainState
    progress: Progress
    evaluation: dict[str, Any] | None
    loss_nats: float | None  # None if this step was not evaluated


class CheckpointSaver:
    """The saves of a run, one at a time in the background."""

    def __init__(self, context: RunContext, programs: TrainPrograms, control: Control):
        self._context, self._programs, self._control = context, programs, control
        self._directory, self._store = context.directory, context.store
        self._failed = 0  # in a row
        self._is_in_flight = False
        self._newest: SaveRequest | None = None
        self.is_retry_due = False

    def save(self, request: SaveRequest) -> None:
        """Pass a state to the store, and return when it may be donated.

        Raises:
          BudgetSpent: if a parameter is not finite. Such a state is never committed.
          SaveFailed: if two saves in a row failed.
        """
        step, state = request.step, request.state
        if not self._programs.is_finite((state.params, state.opt_state)):
            values = {
                "verdict": float(guards.STATE_NOT_FINITE),
                "learning_rate": self._context.run.optim.lr,
            }
            unknown = dict.fromkeys(("loss_nats", "grad_norm"), float("nan"))
            raise BudgetSpent(step, step, values | unknown)
        self.wait()
        self._newest, self.is_retry_due = request, False
        last, budget = request.progress.last_skipped, self._context.run.guard.budget
        loss = request.loss_nats
        try:
            self._is_in_flight = True
            self._store.save(
                step,
                state,
                self._meta(request),
                loss_nats=None if loss is None or not math.isfinite(loss) else loss,
                healthy=last is None or step - last > budget,
            )
        except SaveFailed as error:  # it could not begin
            self._count(error)
        self._directory.step = step

    def check(self) -> None:
        """If a save has failed, mark the next state as due to be saved. Called once a step."""
        try:
            self._store.check()
        except SaveFailed as error:
            self._count(error)

    def finish(self) -> None:
        """Return when the newest save is committed, after one retry if it failed."""
        self.wait()
        if self.is_retry_due:
            assert self._newest is not None
            # If only the removal of an older step failed, this one is committed.
            if self._newest.step not in self._store.steps():
                self.save(self._newest)  # no later step has donated its buffers
            self._store.wait()

    def abandon(self) -> None:
        """Wait for the save in flight and retry none, before a rewind abandons its state."""
        self.wait()
        self._newest, self.is_retry_due = None, False

    def wait(self) -> None:
        """Wait for the save in flight. If it failed, its space on the disk is freed.

        Raises SaveFailed if it failed, and the one before it.
        """
        try:
            self._store.wait()
        except SaveFailed as error:
            self._count(error)
            return
        if self._is_in_flight:
            self._is_in_flight, self._failed = False, 0

    def _meta(self, request: SaveRequest) -> dict[str, Any]:
        run, progress = self._context.run, request.progress
        patience = run.train.patience
        stopped_early = patience is not None and progress.evaluations_without_gain >= patience
        return {
            "step": request.step,
            "finished": request.step == run.train.steps or stopped_early,
            "config": config.to_json(run),
            "data": self._programs.data.fingerprint,
            "progress": dataclasses.asdict(progress),
            "evaluation": request.evaluation and sinks.finite(request.evaluation),
            "rewinds": self._context.rewinds.as_json(),
            "control": self._control.as_json(request.step),
        }

    def _count(self, error: SaveFailed) -> None:
        """Remove the files of a failed save; raise at the second failure in a row.

        With several processes the first failure is raised: one process alone cannot save again,
        but all can start again.
        """
        self._failed, self._is_in_flight, self.is_retry_due = self._failed + 1, False, True
        if self._directory.is_writer:
            self._store.remove_torn()
        if self._failed > 1 or self._context.processes.peers.count > 1:
            raise error
        self._context.console.warn(f"{error}\ntrying once more", step=self._directory.step)


def check_disk_space(programs: TrainPrograms, committed: int, directory: RunDir) -> None:
    """Compare the free space with that of the kept steps, and one more while it is written.

    Arrays are counted at their size; compression saves a little of it. `committed` is the number of
    steps on the disk already. Raises NotWritable if they do not fit, with both numbers.
    """
    config = programs.run.checkpoint
    if config.space == "ignore":
        return
    one = tree.size_bytes(programs.shapes)
    healthy = 2  # steps: one to rewind to, and its successor
    count = config.keep_last + config.keep_best + _permanent_steps(programs.run) + healthy
    missing = max(count + 1 - committed, 1)
    if config.directory is not None:
        missing = 1  # the local copy of the step that is being saved
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
            why=f"{missing} more of {formatting.size(one)} need {formatting.size(missing * one)},"
            f" and {formatting.size(free)} are free",
            fix=f"{fits}--config.checkpoint.space=ignore    # trains until the disk is full",
        )


def _permanent_steps(run: Run) -> int:
    """Return the number of saved steps that are kept for good; 0 if the cadence is in time."""
    every, saved = run.checkpoint.keep_every, run.checkpoint.every
    if every is None or saved.unit == "second":
        return 0
    apart = saved.steps(run.train.steps, run.pace)
    return run.train.steps // math.lcm(every, apart) if apart else 0


def restored_state(
    programs: TrainPrograms, store: Store, step: int, options: ResumeOptions
) -> TrainState:
    """Return the state of a step on this run's mesh.

    An average that the step does not have starts at its parameters; one that the run does not keep
    is left out. In a step without counters of spikes, which earlier versions wrote, each skipped
    step is a spike. The options reset the optimizer state, and cast arrays. Raises DataError if the
    step does not fit the model, or has other dtypes and `options.cast` is off.
    """
    target, layout = programs.abstract(), store.layout(step)
    stored = in_stored_dtypes(target, layout) if options.cast else target
    has_average = any(path.startswith("average/") for path in layout)
    stored, is_whole = _without_absent(stored, layout), "guard/spikes" in layout
    is_whole &= has_average == (target.average is not None)
    if is_whole and not options.reset_optimizer:
        state = store.restore(step, stored)
        return _cast(state, target) if options.cast else state

    def part(name: str) -> Any:
        return store.restore_part(step, name, getattr(stored, name))

    params, guard, averaged = part("params"), part("guard"), None
    if guard.spikes is None:  # copies: the step donates each array of the state
        guard = guard._replace(spikes=guard.skipped + 0, shift=guard.in_a_row + 0)
    if target.average is not None:
        averaged = part("average") if has_average else average.init(params)
    reset = options.reset_optimizer
    state = TrainState(
        step=jnp.int32(step),
        params=params,
        opt_state=programs.optimizer.init(params) if reset else part("opt_state"),
        guard=guard,
        average=averaged,
    )
    return _cast(state, target)


def check_state(programs: TrainPrograms, store: Store, step: int, options: ResumeOptions) -> None:
    """Raise DataError if `restored_state` would, from the layout of the step alone.

    Runs from before `precision.moments` kept moments in the dtype of the parameters, so theirs may
    be bfloat16 though no setting differs.
    """
    layout = store.layout(step)
    target = _without_absent(programs.abstract(), layout)

    def parts(state: TrainState) -> dict[str, Any]:
        trees = {"params": state.params, "guard": state.guard}
        if not options.reset_optimizer:
            trees["opt_state"] = state.opt_state
        if state.average is not None and any(path.startswith("average/") for path in layout):
            trees["average"] = state.average
        return trees

    store.check_layout(step, parts(in_stored_dtypes(target, layout)))
    if options.cast:
        return
    try:
        store.check_layout(step, parts(target))
    except DataError as error:
        raise DataError(
            f"checkpoint {step} has other dtypes than this config",
            where=error.where,
            why=error.why,
            fix="--cast    # converts the stored arrays to the dtypes of this config",
        ) from error


def _without_absent(state: TrainState, layout: dict[str, str]) -> TrainState:
    """Return an abstract state without the counters that earlier versions did not store."""
    if "guard/spikes" in layout:
        return state
    absent: Any = {"spikes": None, "shift": None}
    return state._replace(guard=state.guard._replace(**absent))


def first_state(programs: TrainPrograms, store: Store) -> TrainState:
    """Return the state before step 1 of a run that has started: checkpoint 0 or fresh weights."""
    if 0 in store.steps():
        return restored_state(programs, store, 0, ResumeOptions())
    return programs.init_state()


def state_from(programs: TrainPrograms, source: InitSource) -> TrainState:
    """Return a fresh state with the parameters of another run, in this run's dtypes and shardings.

    A new adapter begins at its base instead, a new head of scores at 0, and new heads of later
    tokens at random weights. Raises DataError if the parameters do not fit the model.
    """
    if programs.base is not None and source.adapter is None:
        return programs.init_state()
    source = source.trained
    fresh, target = programs.init_state(), programs.abstract()
    layout = source.store.layout(source.step)
    stored = in_stored_dtypes(target, layout).params
    new = [
        path
        for path in tree.leaves(stored)
        if path.startswith(ADDED_HEADS) and f"params/{path}" not in layout
    ]
    params = source.store.restore_part(
        source.step, "params", tree.drop_leaves(stored, new), left_out=ADDED_HEADS
    )
    params = _cast(tree.merge_leaves(fresh.params, params), target.params)
    if fresh.average is None:
        return fresh._replace(params=params)
    return fresh._replace(params=params, average=_cast(average.init(params), target.average))


def _cast(values: Any, target: Any) -> Any:
    """Return values in the dtypes and shardings of a target tree."""
    cast = jax.jit(
        lambda values: jax.tree.map(lambda x, like: x.astype(like.dtype), values, target),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, target),
    )
    return cast(values)
