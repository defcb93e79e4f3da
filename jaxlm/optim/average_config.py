"""Settings of the average of the parameters, which the state holds in addition to them."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxlm.core.config import Span, setting
from jaxlm.core.span import Paced

BEGIN = "update after which averaging begins; before it, the average equals the parameters"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoAverage:
    """No average."""

    name: Literal["none"] = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ema:
    """Exponential moving average: a small step towards the parameters at each update."""

    name: Literal["ema"] = "ema"
    decay: float = setting(
        0.999,
        "factor on the average at an update; at most (1 + n) / (10 + n) at update n, which"
        " discounts the first parameters",
        low=0,
        below=1,
    )
    begin: Span = setting(Span.parse("0%"), BEGIN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Swa:
    """Stochastic weight averaging: mean of the parameters at the ends of learning-rate cycles."""

    name: Literal["swa"] = "swa"
    begin: Span = setting(Span.parse("75%"), BEGIN)
    every: Span = setting(
        Span.parse("1%"), "updates in a cycle; the mean takes in the parameters at its end"
    )
    high: float | None = setting(
        0.5,
        "learning rate at the first update of a cycle, as a share of the peak; None uses the"
        " schedule's",
        above=0,
    )
    low: float = setting(
        0.5,
        "learning rate at the last update of a cycle, as a share of the peak; constant if equal to"
        " high",
        above=0,
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that a cycle has updates."""
        if not self.every.amount:
            yield "every", "a cycle has at least one update", "--config.average.every=1%"


Average = NoAverage | Ema | Swa


def first_averaged_update(average: Ema | Swa, total: int, tokens_per_step: int | Paced) -> int:
    """Return the first update after which the average differs; for swa that of a snapshot."""
    first = average.every.steps(total, tokens_per_step) if isinstance(average, Swa) else 1
    return average.begin.steps(total, tokens_per_step) + first


def spans(average: Average) -> dict[str, Span]:
    """Return the settings of an average that are spans of the run, by name."""
    if isinstance(average, NoAverage):
        return {}
    known = {"begin": average.begin}
    return known | {"every": average.every} if isinstance(average, Swa) else known


def problems(
    average: Average, total: int, tokens_per_step: int | Paced
) -> Iterator[tuple[str, str, str]]:
    """Yield the conflicts of an average with a run of `total` steps: (setting, why, fix)."""
    if isinstance(average, NoAverage):
        return
    for name, span in spans(average).items():
        if span.unit == "second":
            fix = f"--config.average.{name}={getattr(type(average)(), name)}"
            yield name, f"{span} is a time, not steps, tokens or a share", fix
            return
    # Spans in steps or tokens may be those of a longer run, see `cautions`.
    if all(span.unit == "share" for span in spans(average).values()):
        yield from _unreached(average, total, tokens_per_step)


def cautions(
    average: Average, *, total: int, tokens_per_step: int | Paced
) -> Iterator[tuple[str, str, str]]:
    """Yield the settings beyond the end of a run, which may be intended: (setting, why, fix)."""
    if not isinstance(average, NoAverage):
        yield from _unreached(average, total, tokens_per_step)


def _unreached(
    average: Ema | Swa, total: int, tokens_per_step: int | Paced
) -> Iterator[tuple[str, str, str]]:
    steps = first_averaged_update(average, total, tokens_per_step)
    if total > 2 and steps > total:  # in a run of one or two steps, each share is one step
        why = f"the run of {total} steps ends before parameters are averaged, at update {steps}"
        yield "begin", why, "--config.average.begin=50%"
