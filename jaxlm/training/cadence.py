"""When something is due."""

import time
from collections.abc import Callable

from jaxlm.core.batch_schedule import BatchSchedule
from jaxlm.core.config import Span
from jaxlm.core.span import Paced


class Cadence:
    """Due every so many steps, or every so many seconds, of a run; and always at its end.

    A cadence in steps, shares or tokens is a function of the step alone. One in time is read off a clock, so it does not
    repeat from run to run.

    Args:
      share: takes this process's view and returns the first one's, where several must find the same steps due. They do
        not ask at each step: each answer says how many steps may go by before the next, half of what is left.
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
        # Where batches differ in size, so many tokens are not always so many steps.
        is_uneven = span.unit == "token" and isinstance(tokens_per_step, BatchSchedule)
        self._pace = tokens_per_step if is_uneven else None
        self._amount = span.amount
        self._last = clock()
        self._asked: tuple[int, float] | None = None  # when the share was last asked: step and time
        self._ask_at = 0

    def is_due(self, step: int) -> bool:
        """Whether the span is over once `step` updates are complete. Asked once a step."""
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
            if step < self._ask_at:
                return False
            left = self._seconds - (0.0 if is_over else now - self._last)
            is_over, ahead = self._share((is_over, self._half(left, step, now)))
            self._asked, self._ask_at = (step, now), step + ahead
        if is_over:
            self._last = now
        return is_over

    def _half(self, left: float, step: int, now: float) -> int:
        """The steps that half of the seconds left will take, at the pace since the last question."""
        if self._asked is None:
            return 1
        pace = (now - self._asked[1]) / (step - self._asked[0])
        return max(1, int(min(left / 2 / max(pace, 1e-6), 1e6)))
