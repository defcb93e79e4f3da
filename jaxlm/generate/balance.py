"""The choice of passes that verify guesses: those that save time, tried at a small cost.

A pass with guesses takes r times as long as one without, and draws a tokens of a row: it saves time
if a > r. Both are measured while requests run, since they depend on the texts, the sampling
settings and the machine. Free of JAX.

Example:
  >>> balance = DraftBalance(CallTimes(0.0, 0.01), CallTimes(0.0, 0.015))
  >>> balance.next_call(1)
  DrawCall(is_guessed=True, passes=1)
  >>> for _ in range(20):
  ...     balance.add_guessed(0.015, passes=1, row_passes=2, tokens=2)
  ...     balance.add_plain(0.01, passes=1)
  >>> balance.is_on, balance.next_call(32)
  (False, DrawCall(is_guessed=False, passes=32))
"""

import math
import time
from typing import NamedTuple

SHARE = 0.01  # part of the time of draws that guesses may lose
PAID = 32  # passes without a guess that stands, which a full bucket pays
EXPLORED = 4  # passes of a call with guesses while they are not expected to save time
REFRESH = 32  # most calls with guesses between two without, which measure the ratio
LEAST_SPENT = 0.1  # of the time of a call, in passes
LEAST_LOSS = 0.25  # of the time of a pass, which the bucket has to pay for one with guesses
KEPT_ROWS = 64  # passes of rows over which tokens are averaged
KEPT_RATIOS = 32  # samples over which the ratio is averaged
FIRST_RATIOS = 2  # samples that the ratio measured at the start counts as
OUTLIER = 2.0  # factor from the mean beyond which the time of a call has another reason


clock = time.perf_counter  # of calls; a benchmark on a busy machine sets another


class DrawCall(NamedTuple):
    """The next call of the device: if its passes verify guesses, and the most passes."""

    is_guessed: bool
    passes: int


class CallTimes(NamedTuple):
    """Seconds of a call of the device: apart from its passes, and for each pass."""

    call: float
    each: float

    def passes(self, seconds: float) -> float:
        """Return the part of the seconds of a call that its passes took."""
        return max(seconds - self.call, seconds * LEAST_SPENT)


class DecayedMean:
    """Mean of samples; a sample counts 1 - 1 / `window` times as much after each later one."""

    def __init__(self, window: int):
        self._window = window
        self._sum = self._weight = 0.0

    def add(self, total: float, count: float = 1) -> None:
        """Add `count` samples with a sum."""
        decay = (1 - 1 / self._window) ** count
        self._sum, self._weight = self._sum * decay + total, self._weight * decay + count

    @property
    def mean(self) -> float | None:
        """The mean; None without samples."""
        return self._sum / self._weight if self._weight else None


class DraftBalance:
    """Chooses calls such that guesses lose at most a share of the time, and a few passes.

    What guesses may still lose, in seconds, is a token bucket: each call adds its share, time that
    guesses save is added too, and time that they lose is taken away. While guesses are not expected
    to save time, a few passes try them once the bucket pays for the loss if none stands. Otherwise
    calls with guesses are as long as those without, until the bucket is empty.

    Args:
      plain: times of calls without guesses, at first.
      guessed: times of calls that verify guesses, at first.
    """

    def __init__(self, plain: CallTimes, guessed: CallTimes):
        self._plain_times, self._guessed_times = plain, guessed
        # Of logarithms: the mean of ratios of two noisy times is too large.
        self._ratio = DecayedMean(KEPT_RATIOS)
        self._ratio.add(math.log(guessed.each / plain.each) * FIRST_RATIOS, FIRST_RATIOS)
        self._tokens = DecayedMean(KEPT_ROWS)
        self._reading = DecayedMean(KEPT_ROWS)  # time of the draft's own reading, over passes' time
        self._plain = plain.each  # seconds of a pass without guesses
        self._asked = PAID  # most passes of the last call
        self._is_guessed, self._last_seconds = False, 0.0  # of a pass of the last call
        self._bucket = self._loss(EXPLORED)
        self._since_plain, self._refresh = 0, 1  # calls with guesses, and how many there may be
        self._unread = 0.0  # seconds of reading since the last call with guesses

    @property
    def ratio(self) -> float:
        """Time of a pass with guesses over that of one without, in calls of as many passes.

        The time of the calls and the draft's reading are included.
        """
        plain, guessed = (
            times.call / self._asked / self._plain_times.each
            for times in (self._plain_times, self._guessed_times)
        )
        ratio = (self._pass_ratio + guessed) / (1 + plain)
        return max(ratio, 1.0) * (1 + (self._reading.mean or 0))

    @property
    def _pass_ratio(self) -> float:
        mean = self._ratio.mean
        assert mean is not None
        return max(math.exp(mean), 1.0)

    @property
    def tokens(self) -> float | None:
        """Tokens of a row in a pass with guesses; None before the first."""
        return self._tokens.mean

    @property
    def is_on(self) -> bool:
        """Return True if guesses are expected to save time."""
        return self.tokens is None or self.tokens > self.ratio

    def next_call(self, passes: int) -> DrawCall:
        """Return the next call, of at most `passes` passes."""
        self._asked = passes
        explored = min(passes, EXPLORED)
        if self._since_plain and not self.is_on:
            return DrawCall(False, passes)
        if self._since_plain >= self._refresh:
            return DrawCall(False, explored)
        if self.is_on and self.tokens is not None:
            return DrawCall(self._bucket > 0, passes)
        return DrawCall(True, explored) if self.is_due else DrawCall(False, passes)

    @property
    def is_due(self) -> bool:
        """Return True if guesses are expected to save time, or to be tried now."""
        return self.is_on or self._bucket > 0.999 * self._loss(EXPLORED)

    def _loss(self, passes: int) -> float:
        """Return the seconds that a call with guesses loses if none of them stands."""
        return self._guessed_times.call + passes * self._plain * max(self.ratio - 1, LEAST_LOSS)

    def affords(self, seconds: float) -> bool:
        """Return True if the bucket pays for so much reading of the draft and a pass."""
        return self.is_on or self._bucket >= seconds + self._loss(1)

    def add_reading(self, seconds: float) -> None:
        """Add time in which the draft has read ids that the model had read before."""
        self._add(seconds, -seconds)
        if self.is_on:
            self._unread += seconds

    def add_guessed(self, seconds: float, *, passes: int, row_passes: int, tokens: int) -> None:
        """Add a call with guesses.

        Args:
          seconds: its time.
          passes: its passes.
          row_passes: sum over passes of the rows that drew.
          tokens: tokens that they drew.
        """
        spent = self._guessed_times.passes(seconds)
        self._compare(spent / passes, is_guessed=True)
        self._since_plain += 1
        plain = spent / self._pass_ratio + passes * self._plain_times.call / self._asked
        gained = tokens / row_passes * plain - seconds
        self._tokens.add(tokens, row_passes)
        self._reading.add(self._unread / seconds * passes, passes)
        self._unread = 0.0
        self._add(seconds, gained)

    def add_plain(self, seconds: float, *, passes: int) -> None:
        """Add a call without guesses, see `add_guessed`."""
        self._plain = self._plain_times.passes(seconds) / passes
        self._compare(self._plain, is_guessed=False)
        if self._since_plain:
            self._since_plain, self._refresh = 0, min(2 * self._refresh, REFRESH)
        if not self.is_on:
            self._reading.add(0.0, passes)
        self._add(seconds, 0.0)

    def _compare(self, seconds: float, *, is_guessed: bool) -> None:
        """Add a sample of the ratio, of a call and of the other kind of call before it.

        Args:
          seconds: time of a pass of the call that was done.
          is_guessed: if its passes verified guesses.
        """
        before, was_guessed = self._last_seconds, self._is_guessed
        self._last_seconds, self._is_guessed = seconds, is_guessed
        if before and was_guessed != is_guessed:
            sample, mean = seconds / before, self._pass_ratio
            sample = sample if is_guessed else 1 / sample
            self._ratio.add(math.log(min(max(sample, mean / OUTLIER), mean * OUTLIER)))

    def _add(self, seconds: float, gained: float) -> None:
        self._bucket = min(self._bucket + SHARE * seconds + gained, self._loss(PAID))
