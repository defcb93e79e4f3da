"""The training loop: take a batch, step, evaluate, sample, save. Completion times of steps."""

import abc
import dataclasses
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax

from jaxlm.core import faults
from jaxlm.core.errors import Preempted
from jaxlm.parallel import host
from jaxlm.training import guard
from jaxlm.training.signals import Interrupted, StopRequest
from jaxlm.training.state import TrainState
from jaxlm.training.step import Metrics, Step

PATIENCE = 1.0  # seconds for a step under way, if the loop ends by an error: it may never complete


@dataclasses.dataclass
class Completion:
    """A dispatched step, and the time of its completion; None while it is computed."""

    begun_at: float
    completed_at: float | None = None


class Completions:
    """Notes the completion time of each dispatched step, in a thread.

    The loop fetches the metrics of a step after it has dispatched the next one, or earlier if an
    evaluation or a save comes first. The time of the fetch therefore is not the duration of a step;
    with a synchronous backend, such as a CPU, it is one step late. `now` is a monotonic clock, in
    seconds.
    """

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._queue: queue.SimpleQueue[tuple[Completion, Any] | None] = queue.SimpleQueue()
        # A daemon: a device that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="completions", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._queue.put(None)
        self._thread.join(None if error is None else PATIENCE)

    def observe(self, result: Any, begun_at: float) -> Completion:
        """Return the completion of the step that was dispatched then and computes `result`."""
        completion = Completion(begun_at)
        if result.is_ready():  # as on a synchronous backend
            completion.completed_at = self._now()
        else:
            self._queue.put((completion, result))
        return completion

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            completion, result = item
            try:
                jax.block_until_ready(result)
            except Exception:  # the loop raises this error when it fetches the metrics
                return
            completion.completed_at = self._now()
            del item, completion, result  # do not hold the array while waiting for the next one


@dataclasses.dataclass
class Progress:
    """Counters of the host, saved with each checkpoint."""

    tokens: int = 0  # trained on so far, without padding
    best_loss: float | None = None
    best_step: int | None = None
    evaluations_without_gain: int = 0
    # The newest step that was not applied, by the guard's judgement of its loss or gradient.
    last_skipped: int | None = None
    # Rows and tokens read of each source of a mixture.
    read: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    # Pieces of damaged token shards that were left out: (document, first id, number of ids).
    lost: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    first_loss: float | None = None  # of the first step, in nats
    divergence: dict[str, Any] | None = None  # verdict on a loss that is too high
    judged: dict[str, Any] | None = None  # the losses that this verdict is of, see `Divergence`

    def note(self, loss: float, step: int) -> bool:
        """Count an evaluation, and return whether its loss is finite and the lowest so far."""
        if not loss < (math.inf if self.best_loss is None else self.best_loss):
            self.evaluations_without_gain += 1
            return False
        self.best_loss, self.best_step, self.evaluations_without_gain = loss, step, 0
        return True

    def forget(self) -> None:
        """Forget the lowest loss, because later evaluations are of another set."""
        self.best_loss, self.best_step, self.evaluations_without_gain = None, None, 0
        if self.judged is not None:
            self.judged |= dict.fromkeys(("evaluation", "first_evaluation", "best"))


class BudgetSpent(Exception):
    """Too many steps in a row were not applied, so the same batches cannot be trained on."""

    def __init__(self, first: int, step: int, values: dict[str, float]):
        super().__init__(f"steps {first} to {step} were not applied")
        self.first, self.step, self.values = first, step, values


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopLimits:
    """Start of a loop and the limits that end it."""

    start: int  # completed steps at the start
    steps: int  # completed steps at the end of the run
    stop_at: int  # completed steps at which this loop ends
    # Evaluations in a row without a lower loss that end the run; None for no limit.
    patience: int | None
    keep_best: bool  # save each step with the lowest loss so far
    budget: int  # steps in a row that may not be applied
    resume_command: str = (
        "run the same command again"  # command that resumes, for the error of a stop
    )


class TrainLoop(abc.ABC):
    """The loop over steps. A subclass has the `progress`, decides what is due, and does it.

    The `is_*_due` methods take a number of completed steps.
    """

    progress: Progress

    @abc.abstractmethod
    def is_log_due(self, step: int) -> bool:
        """Return whether the metrics of a step are logged."""

    def is_eval_due(self, step: int) -> bool:
        """Return whether the state after a step is evaluated."""
        return False

    def is_sample_due(self, step: int) -> bool:
        """Return whether the state after a step writes samples."""
        return False

    def is_save_due(self, step: int) -> bool:
        """Return whether the state after a step is saved."""
        return False

    def is_task_due(self, step: int) -> bool:
        """Return whether the state after a step is scored on tasks."""
        return False

    @abc.abstractmethod
    def count(
        self, values: dict[str, float], data_wait_seconds: float, begun_at: float, done_at: float
    ) -> None:
        """Count a completed step.

        Args:
          values: its metrics.
          data_wait_seconds: its wait for the batch.
          begun_at, done_at: times at which it was dispatched and completed.
        """

    @abc.abstractmethod
    def log(self, step: int, values: dict[str, float]) -> None:
        """Log the metrics of a step."""

    def evaluate(self, state: TrainState, step: int) -> float | None:
        """Evaluate a state and return the loss that ranks checkpoints; None without one."""
        return None

    def sample(self, state: TrainState, step: int) -> None:
        """Write samples of a state."""
        return

    def score_tasks(self, state: TrainState, step: int) -> None:
        """Score a state on tasks."""
        return

    @abc.abstractmethod
    def save(self, state: TrainState, step: int, loss_nats: float | None) -> None:
        """Save a state, with the loss that ranks it if it was just evaluated."""

    def before_step(self, completed: int) -> None:
        """Do what comes before a step, with the number of completed ones."""
        return

    def note_skipped(self, step: int, values: dict[str, float], layers: Any) -> None:
        """Record a step that was not applied: its metrics and gradient norms by layer."""
        return

    def check_saves(self) -> None:
        """Raise SaveFailed if a save in the background failed."""
        return

    def enter(self, phase: str) -> None:
        """Note the phase that begins: "data" or "step"."""
        return

    def is_observed(self, moment: str) -> bool:
        """Return whether a callback is called at a moment, such as `on_log`."""
        return False

    def observe(self, moment: str, state: TrainState, step: int, batch: Any) -> None:
        """Call the callbacks of a moment."""
        return

    def is_over(self) -> bool:
        """Return whether the step that is being computed is the last one. Called once a step."""
        return False

    def run(
        self,
        step: Step,
        state: TrainState,
        batches: Iterator[Any],
        limits: LoopLimits,
        stop: StopRequest,
        now: Callable[[], float] = time.monotonic,
    ) -> TrainState:
        """Train from `limits.start` completed steps to the end; the returned state is saved.

        The metrics of a step are fetched after the next one was dispatched, so the device never
        waits for Python. Before an evaluation, samples or a save they are fetched first.

        Args:
          step: the compiled step.
          state: the state after `limits.start` steps.
          batches: batches of the following steps.
          limits: start and end of the loop.
          stop: request to stop, by a signal or a peer.
          now: clock of the times that `count` gets.

        Raises:
          BudgetSpent: if `limits.budget` steps in a row were not applied.
          Preempted: if a stop was requested; the last completed step is saved.
        """
        pending: tuple[int, Metrics, float, Completion] | None = None

        def settle() -> None:
            nonlocal pending
            if pending is not None:
                self._settle(*pending, limits.budget, now)
                pending = None

        saved = limits.start

        def save(state: TrainState, completed: int, loss: float | None) -> None:
            nonlocal saved
            settle()
            self.save(state, completed, loss)
            saved = completed

        def preempted(completed: int) -> Preempted:
            reached = f"after step {completed}, which is saved" if completed else "before step 1"
            return Preempted(
                f"the run was stopped by {stop.reason} {reached}",
                where=f"step {completed}",
                why=f"{limits.steps - completed} of {limits.steps} steps are left",
                fix=limits.resume_command,
            )

        with Completions(now) as completions:
            for completed in range(limits.start + 1, limits.stop_at + 1):
                self.before_step(completed - 1)
                stop.enter()
                self.enter("data")
                wait_start = now()
                try:
                    with stop.waiting():
                        faults.point("data.next", completed)
                        batch = next(batches)
                except Interrupted:
                    if saved < completed - 1:
                        save(state, completed - 1, None)
                    raise preempted(completed - 1) from None
                begun_at = now()
                waited = begun_at - wait_start
                self.enter("step")
                faults.point("step.before", completed)
                state, metrics = step(state, batch)
                completion = completions.observe(metrics["loss_nats"], begun_at)
                faults.point("step.after", completed)
                settle()
                pending = (completed, metrics, waited, completion)
                self.check_saves()
                if self.is_observed("on_log"):
                    settle()  # before the next step takes the memory of the state
                    self.observe("on_log", state, completed, batch)

                loss, is_best = None, False
                if self.is_eval_due(completed):
                    settle()
                    loss = self.evaluate(state, completed)
                    is_best = loss is not None and self.progress.note(loss, completed)
                    self.observe("on_evaluation", state, completed, batch)
                if self.is_sample_due(completed):
                    settle()
                    self.sample(state, completed)
                if self.is_task_due(completed):
                    settle()
                    self.score_tasks(state, completed)
                without_gain = self.progress.evaluations_without_gain
                is_patience_spent = limits.patience is not None and without_gain >= limits.patience
                is_stopped = stop.is_due
                is_last = (
                    self.is_over() or completed == limits.stop_at or is_stopped or is_patience_spent
                )
                if is_last or self.is_save_due(completed) or (is_best and limits.keep_best):
                    save(state, completed, loss)
                    self.observe("on_checkpoint", state, completed, batch)
                if is_stopped and completed < limits.steps:
                    raise preempted(completed)
                if is_last:
                    break
        return state

    def _settle(
        self,
        step: int,
        metrics: Metrics,
        waited: float,
        completion: Completion,
        budget: int,
        now: Callable[[], float],
    ) -> None:
        """Fetch and count the metrics of a step, and log them if that is due."""
        layers = metrics.pop("layers")
        values = {name: float(value) for name, value in metrics.items()}
        # The thread may be late.
        done_at = now() if completion.completed_at is None else completion.completed_at
        self.progress.tokens += round(values["tokens"])
        self.count(values, waited, completion.begun_at, done_at)
        if values["verdict"]:
            if values["verdict"] not in (guard.OVERFLOW, guard.NO_WEIGHT):
                self.progress.last_skipped = step
            self.note_skipped(step, values, host.fetch(layers))
        if self.is_log_due(step):
            self.log(step, values)
        skipped = int(values["skipped_in_a_row"])
        if skipped >= budget:
            raise BudgetSpent(step - skipped + 1, step, values)
