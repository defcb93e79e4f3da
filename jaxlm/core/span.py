"""Spans: durations and cadences in steps, shares of the run, tokens or time."""

import dataclasses
import math
import re
from typing import Literal, Protocol


class Paced(Protocol):
    """Conversion from tokens to steps for a run whose batches differ in size."""

    def steps(self, tokens: float) -> int:
        """Return the fewest steps that have at least this many tokens."""


_SPAN = re.compile(r"([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*(%|tok|s|m|h|)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_FORMS = "give steps (500), a share ('5%'), tokens ('1e6tok') or time ('10m')"


@dataclasses.dataclass(frozen=True)
class Span:
    """Steps (`500`), a share of the run (`"5%"`), tokens (`"1e6tok"`) or time (`"30s"`, `"2h"`)."""

    text: str
    amount: float
    unit: Literal["step", "share", "token", "second"]

    @classmethod
    def parse(cls, value: "int | str | Span") -> "Span":
        """Parse a span. Raises ValueError if it is malformed."""
        if isinstance(value, Span):
            return value
        text = str(value).strip()
        match = _SPAN.fullmatch(text)
        if match is None or isinstance(value, bool) or math.isinf(float(match[1])):
            raise ValueError(f"{text!r} is not a span: {_FORMS}")
        amount, suffix = float(match[1]), match[2]
        if suffix == "%":
            return cls(text, amount / 100, "share")
        if suffix == "tok":
            return cls(text, amount, "token")
        if suffix:
            return cls(text, amount * _SECONDS[suffix], "second")
        if amount != int(amount):
            raise ValueError(f"{text!r} steps is not a whole number")
        return cls(text, amount, "step")

    def steps(self, total: int, tokens_per_step: int | Paced) -> int:
        """Return the span in whole steps from the start of a run of `total` steps.

        A span above zero is at least one step.

        Raises:
          ValueError: if the span is a time, which only a cadence can be.
        """
        if self.unit == "second":
            raise ValueError(f"{self.text!r} is a time; only a cadence can be one")
        if self.unit == "token" and not isinstance(tokens_per_step, int):
            return tokens_per_step.steps(self.amount)
        per_token = 1 / tokens_per_step if isinstance(tokens_per_step, int) else 0.0
        scale = {"step": 1.0, "share": float(total), "token": per_token}[self.unit]
        return math.ceil(self.amount * scale - 1e-9)

    def plain(self) -> int | str:
        """Return the JSON form: an int for a plain number of steps, else the text."""
        return (
            int(self.text)
            if self.text.isdecimal() and self.text == str(int(self.text))
            else self.text
        )

    def __str__(self) -> str:
        return self.text
