"""Cadence of an action, such as a save, in steps, tokens or seconds.

Example:
  >>> from jaxlm.core.config import Span
  >>> every = Cadence(Span.parse("25%"), total=8, tokens_per_step=1024)
  >>> [step for step in range(1, 9) if every.is_due(step)]
  [2, 4, 6, 8]
"""

import time
from collections.abc import Callable

from jaxlm.core.batch_schedule import BatchSchedule
from jaxlm.core.config import Span
from jaxlm.core.span import Paced


class Cadence:
    """Due at intervals of steps or seconds of a run, and always at its end.

    A cadence in steps, shares or tokens is a function of the step alone. A cadence in time uses a
    clock, so it differs from run to run.

    Args:
      span: the interval.
      total: updates in the whole run.
      tokens_per_step: tokens of a step, or the batch schedule.
      clock: a monotonic clock, in seconds.
      share: receives this process's value and returns the first process's, so that the same steps
        are due on all processes. It is not called at each step: each result contains the number of
        steps until the next call, half of the steps left.
    """

    def __init__(
        self,
        span: Span,
        *,
        total: int,
        tokens_per_step: int | Paced,
        clock: Callable[[], float] = time.monotonic,
        share: Callable[[tuple[bool, int]], tuple[bool, int]] | None = None,
    ):
        self._total, self._clock, self._share = total, clock, share
        self._seconds = span.amount if span.unit == "second" else None
        self._steps = 0 if self._seconds is not None else span.steps(total, tokens_per_step)
        # With batches of several sizes, a span of tokens is not a fixed number of steps.
        is_uneven = span.unit == "token" and isinstance(tokens_per_step, BatchSchedule)
        self._pace = tokens_per_step if is_uneven else None
        self._amount = span.amount
        self._last = clock()
        self._shared: tuple[int, float] | None = None  # step and time of the last call of `share`
        self._share_at = 0  # step of the next one

    def is_due(self, step: int) -> bool:
        """Return whether the span ends with `step` completed updates; call it once a step."""
        if step == self._total:
            return True
        if isinstance(self._pace, BatchSchedule):
            done, before = (self._pace.tokens(n) // self._amount for n in (step, step - 1))
            return self._steps > 0 and done > before
        if self._seconds is None:
            return self._steps > 0 and step % self._steps == 0
        now = self._clock()
        is_over = now - self._last >= self._seconds
        if self._share is not None:
            if step < self._share_at:
                return False
            left = self._seconds - (0.0 if is_over else now - self._last)
            is_over, ahead = self._share((is_over, self._half(left, step, now)))
            self._shared, self._share_at = (step, now), step + ahead
        if is_over:
            self._last = now
        return is_over

    def _half(self, left: float, step: int, now: float) -> int:
        """Return the steps in half of the time left, at the pace since the last `share`."""
        if self._shared is None:
            return 1
        pace = (now - self._shared[1]) / (step - self._shared[0])
        return max(1, int(min(left / 2 / max(pace, 1e-6), 1e6)))
