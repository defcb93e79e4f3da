"""The time at which each step is complete on the devices."""

import queue
import threading
from collections.abc import Callable
from typing import Any, Self

import jax

PATIENCE = 1.0  # seconds for a step under way, if the loop ends by an error: it may never complete


class Completion:
    """A dispatched step, and the time of its completion; None while it is computed."""

    completed_at: float | None = None


class Completions:
    """Notes the completion time of each dispatched step, in a thread.

    The loop fetches the metrics of a step after it has dispatched the next one, or earlier if an
    evaluation or a save comes first. The time of the fetch therefore is not the duration of a step;
    with a synchronous backend, such as a CPU, it is one step late.

    Args:
      now: a monotonic clock, in seconds.
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

    def observe(self, result: Any) -> Completion:
        """Return the completion of the step that has just been dispatched and computes `result`."""
        completion = Completion()
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
