"""Settings of the average of the parameters, which is kept beside them."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxlm.core.config import Span, setting
from jaxlm.core.span import Paced

BEGIN = "update after which it begins; until then it is the parameters themselves"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoAverage:
    """Only the parameters."""

    name: Literal["none"] = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ema:
    """The exponential moving average: each update, a small step towards the parameters."""

    name: Literal["ema"] = "ema"
    decay: float = setting(
        0.999,
        "what is kept of the average at an update; at the n-th at most (1 + n) / (10 + n), so that it forgets its start",
        low=0,
        below=1,
    )
    begin: Span = setting(Span.parse("0%"), BEGIN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Swa:
    """Stochastic weight averaging: the mean of the parameters at the ends of cycles of the learning rate."""

    name: Literal["swa"] = "swa"
    begin: Span = setting(Span.parse("75%"), BEGIN)
    every: Span = setting(
        Span.parse("1%"), "updates in a cycle, at whose end the parameters join the mean"
    )
    high: float | None = setting(
        0.5,
        "learning rate at the first update of a cycle, as a share of the peak; None keeps the schedule's",
        above=0,
    )
    low: float = setting(
        0.5, "that at the last update of a cycle; the same as `high` is a constant rate", above=0
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """A cycle has updates."""
        if not self.every.amount:
            yield "every", "no cycle ends in no updates", "--config.average.every=1%"


Average = NoAverage | Ema | Swa


def start(average: Ema | Swa, total: int, tokens_per_step: int | Paced) -> int:
    """The first update after which the average holds more than the parameters, or for swa their first snapshot."""
    first = average.every.steps(total, tokens_per_step) if isinstance(average, Swa) else 1
    return average.begin.steps(total, tokens_per_step) + first


def problems(
    average: Average, total: int, tokens_per_step: int | Paced
) -> Iterator[tuple[str, str, str]]:
    """What is wrong with an average on a run of `total` steps: (setting, why, fix)."""
    if isinstance(average, NoAverage):
        return
    found = {"begin": average.begin}
    if isinstance(average, Swa):
        found["every"] = average.every
    for name, span in found.items():
        if span.unit == "second":
            fix = f"--config.average.{name}={getattr(type(average)(), name)}"
            yield name, f"updates are counted, and {span} is a time", fix
            return
    # The first part of a longer run may end before, see `cautions`.
    if all(span.unit == "share" for span in found.values()):
        yield from _unreached(average, total, tokens_per_step)


def cautions(
    average: Average, *, total: int, tokens_per_step: int | Paced
) -> Iterator[tuple[str, str, str]]:
    """What of an average the run does not reach, though that may be meant: (setting, why, fix)."""
    if not isinstance(average, NoAverage):
        yield from _unreached(average, total, tokens_per_step)


def _unreached(
    average: Ema | Swa, total: int, tokens_per_step: int | Paced
) -> Iterator[tuple[str, str, str]]:
    steps = start(average, total, tokens_per_step)
    if total > 2 and steps > total:  # of a step or two, shares are a step each
        yield (
            "begin",
            f"the run of {total} steps ends before anything was averaged, at update {steps}",
            "--config.average.begin=50%",
        )
