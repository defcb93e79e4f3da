"""Limits of each key: calls and tokens a minute, and calls at once. Used by the event loop alone.

Example:
  >>> quotas = Quotas(KeyLimits(running=1))
  >>> quotas.begin("ann", 20)
  >>> quotas.begin("ann", 20)
  Traceback (most recent call last):
  jaxlm.serve.fields.RefusedRequest: this key has 1 calls running, its limit
"""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable

from jaxlm.serve.fields import RefusedRequest

MINUTE = 60.0
RUNNING_SECONDS = 1  # after which a call may come again if others of its key run


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyLimits:
    """Limits of each key; 0 is no limit.

    Args:
      calls: calls a minute.
      running: calls at once, those that wait for a slot included.
      tokens: tokens a minute, of prompts and of the answers that calls allow.
    """

    calls: int = 0
    running: int = 0
    tokens: int = 0


class Allowance:
    """An amount that refills evenly, up to `limit` in a minute, which is there at the start."""

    def __init__(self, limit: int, now: float):
        self._limit, self._left, self._at = limit, float(limit), now

    def seconds_until(self, amount: int, now: float) -> float:
        """Return the time until an amount of at most the limit is there."""
        refilled = (now - self._at) * self._limit / MINUTE
        self._left, self._at = min(self._limit, self._left + refilled), now
        return max(0.0, (amount - self._left) * MINUTE / self._limit)

    def take(self, amount: int) -> None:
        """Use an amount."""
        self._left -= amount


class Quotas:
    """Calls and tokens of each key by its name, within the same limits."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float] = time.monotonic):
        self._limits, self._clock = limits, clock
        self._running: Counter[str] = Counter()
        self._allowances: dict[tuple[str, str], Allowance] = {}

    def begin(self, name: str, tokens: int) -> None:
        """Count a call of a key. Raises RefusedRequest if the key is at a limit."""
        limits, now = self._limits, self._clock()
        if limits.tokens and tokens > limits.tokens:
            message = f"the call may take {tokens} tokens, and the key has {limits.tokens} a minute"
            raise RefusedRequest(422, message, "max_tokens")
        if limits.running and self._running[name] >= limits.running:
            message = f"this key has {limits.running} calls running, its limit"
            raise RefusedRequest(429, message, retry_after=str(RUNNING_SECONDS))
        demands = (("calls", limits.calls, 1), ("tokens", limits.tokens, tokens))
        amounts = []
        for what, limit, amount in demands:
            if not limit:
                continue
            allowance = self._allowances.setdefault((name, what), Allowance(limit, now))
            if seconds := allowance.seconds_until(amount, now):
                message = f"this key has {limit} {what} a minute; try again in {seconds:.0f} s"
                raise RefusedRequest(429, message, retry_after=str(math.ceil(seconds)))
            amounts.append((allowance, amount))
        for allowance, amount in amounts:
            allowance.take(amount)
        self._running[name] += 1

    def withdraw(self, name: str, tokens: int) -> None:
        """Give back what a call took that was refused after `begin`, by a full queue."""
        self.end(name)
        for what, amount in (("calls", 1), ("tokens", tokens)):
            if (allowance := self._allowances.get((name, what))) is not None:
                allowance.take(-amount)

    def end(self, name: str) -> None:
        """Count the end of a call."""
        self._running[name] -= 1
