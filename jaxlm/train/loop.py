"""The loop over steps: evaluate, save, then take the batch."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxlm.core.errors import Diverged, Preempted
from jaxlm.train.signals import StopRequest
from jaxlm.train.state import TrainState
from jaxlm.train.step import Metrics, Step


@dataclasses.dataclass
class Progress:
    """What the host counts beside the state, and saves with it."""

    tokens: int = 0  # trained on so far, padding not counted
    best_loss: float | None = None
    best_step: int | None = None
    evaluations_without_gain: int = 0

    def note(self, loss: float, step: int) -> bool:
        """Counts an evaluation; whether its loss is the lowest so far."""
        if self.best_loss is not None and loss >= self.best_loss:
            self.evaluations_without_gain += 1
            return False
        self.best_loss, self.best_step, self.evaluations_without_gain = loss, step, 0
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the loop is handed, so that it knows no data, evaluation or checkpoint.

    The functions of a step say whether something is due once that many steps are complete.
    """

    is_log_due: Callable[[int], bool]
    is_eval_due: Callable[[int], bool]
    is_save_due: Callable[[int], bool]
    before: Callable[[int], None]  # each step, with the number of completed ones
    count: Callable[[float, float], None]  # each step's tokens, and its seconds of waiting for data
    log: Callable[[int, dict[str, float]], None]  # a logged step's metrics
    evaluate: Callable[
        [TrainState, int], float | None
    ]  # the loss that ranks checkpoints; None for no validation set
    save: Callable[
        [TrainState, int, float | None], None
    ]  # with that loss, where this very step was evaluated
    check_saves: Callable[[], None]  # raises where a save in the background failed


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
    now: Callable[[], float] = time.monotonic,
) -> TrainState:
    """Runs from `start` completed steps to `steps`, or to `stop_at`; the state it returns is saved.

    The metrics of a step are fetched after the next one has been dispatched, so the device does not wait for Python.
    Before an evaluation or a save they are fetched first: a state whose loss is not finite is never committed.

    Raises:
      Diverged: where a loss or a gradient norm is not finite. Every committed step is finite.
      Preempted: where `stop` was requested; the last completed step is saved.
    """
    waiting: tuple[int, Metrics, float] | None = None

    def settle() -> None:
        nonlocal waiting
        if waiting is not None:
            _settle(*waiting, progress, hooks)
            waiting = None

    for completed in range(start + 1, stop_at + 1):
        hooks.before(completed - 1)
        asked = now()
        batch = next(batches)
        waited = now() - asked
        state, metrics = step(state, batch)
        settle()
        waiting = (completed, metrics, waited)
        hooks.check_saves()

        loss = None
        best = False
        if hooks.is_eval_due(completed):
            settle()
            loss = hooks.evaluate(state, completed)
            best = loss is not None and progress.note(loss, completed)
        given_up = patience is not None and progress.evaluations_without_gain >= patience
        last = completed == stop_at or stop.requested or given_up
        if last or hooks.is_save_due(completed) or (best and keep_best):
            settle()
            hooks.save(state, completed, loss)
        if stop.requested and completed < steps:
            raise Preempted(
                f"stopped by {stop.reason} after step {completed}, which is saved",
                why=f"{steps - completed} of {steps} steps are left",
                fix="run the same command again",
            )
        if last:
            break
    return state


def _settle(step: int, metrics: Metrics, waited: float, progress: Progress, hooks: Hooks) -> None:
    """Fetches and counts the metrics of a step, and logs them where it is time."""
    values = {name: float(value) for name, value in metrics.items()}
    progress.tokens += round(values["tokens"])
    hooks.count(values["tokens"], waited)
    bad = [name for name in ("loss_nats", "grad_norm") if not abs(values[name]) < float("inf")]
    if bad:
        raise Diverged(
            f"{' and '.join(bad)} {'is' if len(bad) == 1 else 'are'} not finite at step {step}",
            where=f"step {step}",
            why=", ".join(
                f"{name} = {values[name]}" for name in ("loss_nats", "grad_norm", "learning_rate")
            ),
            fix=f"--config.optim.lr={values['learning_rate'] / 3:.1e}",
        )
    if hooks.is_log_due(step):
        hooks.log(step, values)
