"""The loop over steps: evaluate, sample, save, then take the batch."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxlm.core import faults
from jaxlm.core.errors import Preempted
from jaxlm.parallel import host
from jaxlm.training import guard
from jaxlm.training.completion import Completion, Completions
from jaxlm.training.signals import Interrupted, StopRequest
from jaxlm.training.state import TrainState
from jaxlm.training.step import Metrics, Step


@dataclasses.dataclass
class Progress:
    """What the host counts beside the state, and saves with it."""

    tokens: int = 0  # trained on so far, padding not counted
    best_loss: float | None = None
    best_step: int | None = None
    evaluations_without_gain: int = 0
    last_skipped: int | None = None  # the newest step that the guard did not apply
    read: dict[str, list[int]] = dataclasses.field(
        default_factory=dict
    )  # rows and tokens of each source of a mixture
    first_loss: float | None = None  # of the first step, in nats
    divergence: dict[str, Any] | None = None  # what is wrong with the loss, if anything

    def note(self, loss: float, step: int) -> bool:
        """Counts an evaluation; whether its loss is the lowest so far."""
        if self.best_loss is not None and loss >= self.best_loss:
            self.evaluations_without_gain += 1
            return False
        self.best_loss, self.best_step, self.evaluations_without_gain = loss, step, 0
        return True

    def forget(self) -> None:
        """Begins anew to look for the lowest loss: evaluations to come are of another set."""
        self.best_loss, self.best_step, self.evaluations_without_gain = None, None, 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the loop is handed, so that it knows no data, evaluation or checkpoint.

    The functions of a step say whether something is due once that many steps are complete.
    """

    is_log_due: Callable[[int], bool]
    is_eval_due: Callable[[int], bool]
    is_sample_due: Callable[[int], bool]
    is_save_due: Callable[[int], bool]
    before: Callable[[int], None]  # each step, with the number of completed ones
    # Each step's metrics, its seconds of waiting for data, and the time at which it was complete.
    count: Callable[[dict[str, float], float, float], None]
    log: Callable[[int, dict[str, float]], None]  # a logged step's metrics
    evaluate: Callable[
        [TrainState, int], float | None
    ]  # the loss that ranks checkpoints; None for no validation set
    sample: Callable[[TrainState, int], None]
    save: Callable[
        [TrainState, int, float | None], None
    ]  # with that loss, where this very step was evaluated
    skipped: Callable[
        [int, dict[str, float], Any], None
    ]  # a step that was not applied: its metrics, and the gradient's norms by layer
    check_saves: Callable[[], None]  # raises where a save in the background failed
    enter: Callable[[str], None] = lambda _: None  # what comes now: "data" or "step"
    # Asked once a step: whether it shall be the last.
    is_over: Callable[[], bool] = lambda: False


class BudgetSpent(Exception):
    """Too many steps in a row were not applied: going on with the same batches is of no use."""

    def __init__(self, first: int, step: int, values: dict[str, float]):
        super().__init__(f"steps {first} to {step} were not applied")
        self.first, self.step, self.values = first, step, values


def run(
    step: Step,
    state: TrainState,
    batches: Iterator[Any],
    *,
    start: int,
    steps: int,
    stop_at: int,
    progress: Progress,
    hooks: Hooks,
    stop: StopRequest,
    patience: int | None,
    keep_best: bool,
    budget: int,
    now: Callable[[], float] = time.monotonic,
) -> TrainState:
    """Runs from `start` completed steps to `steps`, or to `stop_at`; the state it returns is saved.

    The metrics of a step are fetched after the next one has been dispatched, so the device does not wait for Python.
    Before an evaluation, samples or a save they are fetched first. `now` is the clock of the times that hooks get.

    Raises:
      BudgetSpent: where `budget` steps in a row were not applied.
      Preempted: where `stop` was requested; the last completed step is saved.
    """
    waiting: tuple[int, Metrics, float, Completion] | None = None

    def settle() -> None:
        nonlocal waiting
        if waiting is not None:
            _settle(*waiting, progress, hooks, budget, now)
            waiting = None

    saved = start

    def save(state: TrainState, completed: int, loss: float | None) -> None:
        nonlocal saved
        settle()
        hooks.save(state, completed, loss)
        saved = completed

    def preempted(completed: int) -> Preempted:
        reached = (
            f"after step {completed}, which is saved" if completed else "before the first step"
        )
        return Preempted(
            f"stopped by {stop.reason} {reached}",
            where=f"step {completed}",
            why=f"{steps - completed} of {steps} steps are left",
            fix="run the same command again",
        )

    with Completions(now) as completions:
        for completed in range(start + 1, stop_at + 1):
            hooks.before(completed - 1)
            stop.enter()
            hooks.enter("data")
            asked = now()
            try:
                with stop.waiting():
                    faults.point("data.next", completed)
                    batch = next(batches)
            except Interrupted:
                if saved < completed - 1:
                    save(state, completed - 1, None)
                raise preempted(completed - 1) from None
            waited = now() - asked
            hooks.enter("step")
            faults.point("step.before", completed)
            state, metrics = step(state, batch)
            completion = completions.observe(metrics["loss_nats"])
            faults.point("step.after", completed)
            settle()
            waiting = (completed, metrics, waited, completion)
            hooks.check_saves()

            loss = None
            best = False
            if hooks.is_eval_due(completed):
                settle()
                loss = hooks.evaluate(state, completed)
                best = loss is not None and progress.note(loss, completed)
            if hooks.is_sample_due(completed):
                settle()
                hooks.sample(state, completed)
            given_up = patience is not None and progress.evaluations_without_gain >= patience
            is_stopped = stop.is_due
            last = hooks.is_over() or completed == stop_at or is_stopped or given_up
            if last or hooks.is_save_due(completed) or (best and keep_best):
                save(state, completed, loss)
            if is_stopped and completed < steps:
                raise preempted(completed)
            if last:
                break
    return state


def _settle(
    step: int,
    metrics: Metrics,
    waited: float,
    completion: Completion,
    progress: Progress,
    hooks: Hooks,
    budget: int,
    now: Callable[[], float],
) -> None:
    """Fetches and counts the metrics of a step, and logs them where it is time."""
    layers = metrics.pop("layers")
    values = {name: float(value) for name, value in metrics.items()}
    at = now() if completion.at is None else completion.at  # the thread may be late
    progress.tokens += round(values["tokens"])
    hooks.count(values, waited, at)
    if values["verdict"]:
        if values["verdict"] != guard.OVERFLOW:
            progress.last_skipped = step
        hooks.skipped(step, values, host.fetch(layers))
    if hooks.is_log_due(step):
        hooks.log(step, values)
    in_a_row = int(values["skipped_in_a_row"])
    if in_a_row >= budget:
        raise BudgetSpent(step - in_a_row + 1, step, values)
