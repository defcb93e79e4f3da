"""The loop over steps: evaluate, save, then take the batch."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxlm.core.errors import Diverged, Preempted
from jaxlm.train.signals import StopRequest
from jaxlm.train.state import TrainState
from jaxlm.train.step import Metrics


@dataclasses.dataclass
class Progress:
    """What the host counts beside the state; saved with it as JSON."""

    tokens: int = 0  # trained on so far, padding not counted
    best_loss: float | None = None
    best_step: int | None = None
    evaluations_without_gain: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the loop is handed, so that it knows no data, evaluation or checkpoint.

    `evaluate` returns the loss that ranks checkpoints, in nats per token, or None where nothing was evaluated.
    `save` gets that loss where this very step was evaluated. `log` gets each logged step's record of floats.
    """

    evaluate: Callable[[TrainState, int], float | None]
    save: Callable[[TrainState, int, Progress, float | None], None]
    check_saves: Callable[[], None]
    log: Callable[[dict[str, Any]], None]
    is_eval_due: Callable[[int], bool]
    is_save_due: Callable[[int], bool]
    is_log_due: Callable[[int], bool]
    clock: Callable[[], float] = time.monotonic


def run(
    step_function: Callable[[TrainState, Any], tuple[TrainState, Metrics]],
    state: TrainState,
    batches: Iterator[Any],
    *,
    start: int,
    steps: int,
    progress: Progress,
    hooks: Hooks,
    stop: StopRequest,
    patience: int | None = None,
    keep_best: bool = True,
) -> TrainState:
    """Runs steps `start` to `steps`; returns the last state, which is saved.

    The metrics of a step are fetched after the next step has been dispatched, so that the device does not wait for
    Python. Before anything is evaluated or saved they are fetched first, so a state whose loss is not a number is
    never committed.

    Raises:
      Diverged: where a loss or gradient norm is not finite. The last committed step is finite.
      Preempted: where `stop` was requested; the state of the last completed step is saved.
    """
    pending: tuple[int, Metrics, float] | None = None
    completed, saved_step = start, start

    def settle() -> None:
        nonlocal pending
        if pending is not None:
            _report(*pending, progress, hooks)
            pending = None

    begun = hooks.clock()
    while completed < steps:
        data_begun = hooks.clock()
        batch = next(batches)
        data_seconds = hooks.clock() - data_begun
        state, metrics = step_function(state, batch)
        settle()
        completed += 1
        pending = (completed, metrics, data_seconds)
        hooks.check_saves()

        loss: float | None = None
        improved = False
        if hooks.is_eval_due(completed):
            settle()
            loss = hooks.evaluate(state, completed)
            improved = loss is not None and _note(progress, loss, completed)
        stopping_early = patience is not None and progress.evaluations_without_gain >= patience
        if hooks.is_save_due(completed) or (improved and keep_best) or stop.requested or stopping_early:
            settle()
            hooks.save(state, completed, progress, loss)
            saved_step = completed
        if stop.requested:
            raise Preempted(
                f"told to stop by {stop.reason}; step {saved_step} is saved",
                where=f"step {completed} of {steps}",
                fix="run the same command again",
            )
        if stopping_early:
            break
    settle()
    del begun
    return state
