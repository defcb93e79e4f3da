"""Settings of the learning-rate schedules, and their conflicts with the length of a run."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from jaxlm.core.config import Span, setting
from jaxlm.core.span import Paced

WARMUP = "steps of linear warm-up"
END = "step at which the floor is reached; the learning rate stays there"
FLOOR = "last learning rate, as a share of the peak"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """Warm-up, then the peak."""

    name: Literal["constant"] = "constant"
    warmup: Span = setting(Span.parse("2%"), WARMUP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearDecay:
    """Warm-up, then a straight line to the floor."""

    name: Literal["linear"] = "linear"
    warmup: Span = setting(Span.parse("2%"), WARMUP)
    end: Span = setting(Span.parse("100%"), END)
    floor: float = setting(0.0, FLOOR, low=0, high=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cosine:
    """Warm-up, then half a cosine to the floor, in one or more cycles that begin at the peak."""

    name: Literal["cosine"] = "cosine"
    warmup: Span = setting(Span.parse("2%"), WARMUP)
    end: Span = setting(Span.parse("100%"), END)
    floor: float = setting(0.1, FLOOR, low=0, high=1)
    cycles: int = setting(1, "cosine cycles; each but the first is a warm restart", low=1)
    growth: float = setting(1.0, "length of a cycle over that of the previous one", low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Polynomial:
    """Warm-up, then a power of the remaining share of the run."""

    name: Literal["polynomial"] = "polynomial"
    warmup: Span = setting(Span.parse("2%"), WARMUP)
    end: Span = setting(Span.parse("100%"), END)
    floor: float = setting(0.0, FLOOR, low=0, high=1)
    power: float = setting(
        2.0, "exponent; 1 is a straight line, a larger one decays earlier", above=0
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exponential:
    """Warm-up, then exponential decay: the same factor at every step."""

    name: Literal["exponential"] = "exponential"
    warmup: Span = setting(Span.parse("2%"), WARMUP)
    end: Span = setting(Span.parse("100%"), END)
    floor: float = setting(0.01, FLOOR, above=0, high=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InverseSqrt:
    """Warm-up, then the inverse square root of the step; needs no end."""

    name: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup: Span = setting(
        Span.parse("2%"), "steps of linear warm-up; four times as many steps halve the peak"
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that there is a warm-up; its length sets the speed of the decay."""
        if not self.warmup.amount:
            yield (
                "warmup",
                "the warm-up sets the speed of the decay; without one, the rate drops to a tenth in"
                " 100 steps",
                "--config.schedule.warmup=2%",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Warm-up, then the peak, multiplied by a factor at regular intervals."""

    name: Literal["step"] = "step"
    warmup: Span = setting(Span.parse("2%"), WARMUP)
    every: Span = setting(Span.parse("30%"), "steps between two cuts, from the end of the warm-up")
    factor: float = setting(0.1, "factor of each cut", above=0, below=1)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that cuts are at least a step apart."""
        if not self.every.amount:
            yield "every", "cuts are at least a step apart", "--config.schedule.every=30%"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneCycle:
    """Half a cosine up to the peak, then half a cosine down to almost zero."""

    name: Literal["one_cycle"] = "one_cycle"
    warmup: Span = setting(Span.parse("30%"), "steps from the first learning rate to the peak")
    end: Span = setting(Span.parse("100%"), END)
    start: float = setting(0.04, "first learning rate, as a share of the peak", low=0, high=1)
    floor: float = setting(4e-6, FLOOR, low=0, high=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wsd:
    """Warm-up, stable, decay (WSD): the peak for most of the run, and a decay at its end."""

    name: Literal["wsd"] = "wsd"
    warmup: Span = setting(Span.parse("2%"), WARMUP)
    end: Span = setting(Span.parse("100%"), END)
    decay: Span = setting(Span.parse("20%"), "steps of decay before the end")
    shape: Literal["sqrt", "linear"] = setting(
        "sqrt", "curve of the decay at its share s: 1 - sqrt(s), or 1 - s"
    )
    floor: float = setting(0.0, FLOOR, low=0, high=1)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that there is a decay; without one the schedule is `constant`."""
        if not self.decay.amount:
            yield "decay", "a decay has at least one step", "--config.schedule.decay=20%"


Schedule = (
    Cosine | LinearDecay | Constant | Polynomial | Exponential | InverseSqrt | Step | OneCycle | Wsd
)


def spans(schedule: Schedule) -> dict[str, Span]:
    """Return the settings of a schedule that are spans of the run, by name."""
    values = {field.name: getattr(schedule, field.name) for field in dataclasses.fields(schedule)}
    return {name: value for name, value in values.items() if isinstance(value, Span)}


def problems(
    schedule: Schedule, total: int, tokens_per_step: int | Paced
) -> Iterator[tuple[str, str, str]]:
    """Yield the conflicts of a schedule with a run of `total` steps: (setting, why, fix).

    An end beyond the run in steps or tokens is no conflict, because the run may be the first part
    of a longer one. See `schedule_functions.cautions`.
    """
    parts = spans(schedule)
    for name, span in parts.items():
        default = spans(type(schedule)())[name]
        fix = f"--config.schedule.{name}={default}"
        if span.unit == "second":
            fix = f"jaxlm config explain schedule.{name}"
            yield name, f"{span} is a time, not steps, tokens or a share", fix
        elif span.unit == "share" and span.amount > 1:
            yield name, f"{span} is more than the whole run", fix
    # In a run of one step each part is one step, so parts cannot conflict.
    if total == 1 or any(span.unit == "second" for span in parts.values()):
        return
    steps = {name: span.steps(total, tokens_per_step) for name, span in parts.items()}
    warmup, end = steps["warmup"], steps.get("end", total)
    default_warmup = Span.parse("2%")
    if warmup >= end:
        limit = (
            f"the schedule ends at step {end} of {total}"
            if "end" in steps
            else f"the run has {total} steps"
        )
        yield (
            "warmup",
            f"the warm-up has {warmup} steps, but {limit}",
            "--config.schedule.warmup="
            f"{default_warmup if default_warmup.steps(total, tokens_per_step) < end else end - 1}",
        )
    elif "decay" in steps and warmup + steps["decay"] > end:
        yield (
            "decay",
            f"{warmup} steps of warm-up and {steps['decay']} of decay do not fit before step {end}",
            f"--config.schedule.decay={end - warmup}",
        )
    elif isinstance(schedule, Cosine) and (short := _first_cycle_steps(schedule, end - warmup)) < 1:
        yield (
            "cycles",
            f"the first of {schedule.cycles} cycles in {end - warmup} steps has {short:.2g} steps",
            f"--config.schedule.cycles={_max_cycles(schedule, end - warmup)}",
        )
    elif "every" in steps and warmup + steps["every"] > total:
        yield (
            "every",
            f"the first cut is at step {warmup + steps['every']}, but the run ends at {total}",
            f"--config.schedule.every={total - warmup}",
        )


def cycle_starts(schedule: Cosine, length: int) -> list[int]:
    """Return the steps, of `length`, at which the cycles begin, and the end of the last.

    With growth g, cycle k of n is g^k times as long as the first. It begins at the share
    (g^k - 1) / (g^n - 1) of the whole; for g = 1, at k / n.
    """
    sizes = [schedule.growth**k for k in range(schedule.cycles)]
    starts = [length * sum(sizes[:k]) / sum(sizes) for k in range(schedule.cycles + 1)]
    return [math.floor(start + 0.5) for start in starts]


def _first_cycle_steps(schedule: Cosine, length: int) -> float:
    return length / sum(schedule.growth**k for k in range(schedule.cycles))


def _max_cycles(schedule: Cosine, length: int) -> int:
    """Return the largest number of cycles in `length` steps whose first has at least one step."""
    count, total = 0, 1.0
    while total <= length:
        count += 1
        total += schedule.growth**count
    return count
