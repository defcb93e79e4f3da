"""The typed truth of a setting, and its ml_collections surface."""

import dataclasses
import math
import re
from typing import Any, Literal


def setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of a section: its default, what it means, its unit, and the range it must lie in.

    `low` and `high` are inclusive, `above` and `below` exclusive.
    """
    meta = {"doc": doc, "unit": unit, "low": low, "high": high, "above": above, "below": below}
    return dataclasses.field(default=default, metadata=meta)


_SPAN = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(%|tok|s|m|h|)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclasses.dataclass(frozen=True)
class Span:
    """How long, or how often: in steps (`500`), a share of the run (`"5%"`), tokens (`"1e6tok"`) or time (`"10m"`)."""

    text: str
    amount: float
    unit: Literal["step", "share", "token", "second"]

    @classmethod
    def parse(cls, value: "int | str | Span") -> "Span":
        """Reads a span. Raises ValueError where it is not one."""
        if isinstance(value, Span):
            return value
        text = str(value).strip()
        match = _SPAN.fullmatch(text)
        if match is None or isinstance(value, bool):
            raise ValueError(f"{text!r} is not a span: give steps (500), a share ('5%'), tokens ('1e6tok') or time ('10m')")
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

    def steps(self, total: int, tokens_per_step: int) -> int:
        """The span in whole steps of a run of `total` steps, rounded up so that a span above zero is at least one step."""
        if self.unit == "second":
            raise ValueError(f"{self.text!r} is a time; only a cadence can be one")
        scale = {"step": 1.0, "share": float(total), "token": 1 / tokens_per_step}[self.unit]
        return math.ceil(self.amount * scale - 1e-9)

    def __str__(self) -> str:
        return self.text
