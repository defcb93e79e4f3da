"""When something is due."""

import time
from collections.abc import Callable

from jaxlm.core.config import Span


class Cadence:
    """Due every so many steps, or every so many seconds, of a run; and always at its end.

    A cadence in steps, shares or tokens is a function of the step alone. One in time is decided by the clock of this
    process, so it does not repeat from run to run.
    """

    def __init__(
        self,
        span: Span,
        *,
        total: int,
        tokens_per_step: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total, self._clock = total, clock
        self._seconds = span.amount if span.unit == "second" else None
        self._steps = 0 if self._seconds is not None else span.steps(total, tokens_per_step)
        self._last = clock()

    def is_due(self, step: int) -> bool:
        """Whether the span is over once `step` updates are complete. Asked once a step."""
        if step == self._total:
            return True
        if self._seconds is None:
            return self._steps > 0 and step % self._steps == 0
        if self._clock() - self._last < self._seconds:
            return False
        self._last = self._clock()
        return True
