"""Handing states to the store, and trying once more where it failed."""

import dataclasses
from typing import Any

from jaxlm.checkpoint.store import Store
from jaxlm.core import config
from jaxlm.core.errors import SaveFailed
from jaxlm.monitor.console import Console
from jaxlm.recipes.control import Control
from jaxlm.recipes.crew import Crew
from jaxlm.recipes.engine import Engine
from jaxlm.recipes.rewinding import Rewinds
from jaxlm.train import guard
from jaxlm.train.loop import BudgetSpent, Progress
from jaxlm.train.rundir import RunDir
from jaxlm.train.state import TrainState


@dataclasses.dataclass(frozen=True)
class Moment:
    """A state, and what the host knows at its step."""

    step: int
    state: TrainState
    progress: Progress
    evaluation: dict[str, Any] | None
    loss_nats: float | None  # where this very step was evaluated


class Saves:
    """The saves of a run, one at a time in the background."""

    def __init__(
        self,
        engine: Engine,
        crew: Crew,
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
        self._newest: Moment | None = None
        self.is_retry_due = False

    def save(self, moment: Moment) -> None:
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
        self.settle()
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
        self.settle()
        if self.is_retry_due:
            assert self._newest is not None
            # If only the removal of an older step failed, this one is there.
            if self._newest.step not in self._store.steps():
                self.save(self._newest)  # no step came after it, so its buffers are still there
            self._store.wait()

    def give_up(self) -> None:
        """Before a rewind: waits for the save in flight, and asks for no other. The state that it was of is given up."""
        self.settle()
        self._newest, self.is_retry_due = None, False

    def settle(self) -> None:
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

    def _meta(self, moment: Moment) -> dict[str, Any]:
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
