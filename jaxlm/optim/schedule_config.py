"""Settings of the learning rate's schedule, and what is wrong with one on a run of so many steps."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from jaxlm.core.config import Span, setting
from jaxlm.core.span import Paced

WARMUP = "steps of linear warm-up"
END = "step at which the floor is reached; it holds from there"
FLOOR = "last learning rate, as a share of the peak"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """Warm-up, then the peak to the end."""

    name: Literal["constant"] = "constant"
    warmup: Span = setting(Span.parse("2%"), WARMUP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """Warm-up, then a straight line to the floor."""

    name: Literal["linear"] = "linear"
    warmup: Span = setting(Span.parse("2%"), WARMUP)
    end: Span = setting(Span.parse("100%"), END)
    floor: float = setting(0.0, FLOOR, low=0, high=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cosine:
    """Warm-up, then half a cosine to the floor, once or in several cycles that each begin at the peak."""

    name: Literal["cosine"] = "cosine"
    warmup: Span = setting(Span.parse("2%"), WARMUP)
    end: Span = setting(Span.parse("100%"), END)
    floor: float = setting(0.1, FLOOR, low=0, high=1)
    cycles: int = setting(1, "times that it falls; each time but the first is a restart", low=1)
    growth: float = setting(1.0, "length of a cycle over that of the one before", low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Polynomial:
    """Warm-up, then a power of what is left of the run."""

    name: Literal["polynomial"] = "polynomial"
    warmup: Span = setting(Span.parse("2%"), WARMUP)
    end: Span = setting(Span.parse("100%"), END)
    floor: float = setting(0.0, FLOOR, low=0, high=1)
    power: float = setting(2.0, "1 is a straight line, more falls early", above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exponential:
    """Warm-up, then the same share of the learning rate lost at every step."""

    name: Literal["exponential"] = "exponential"
    warmup: Span = setting(Span.parse("2%"), WARMUP)
    end: Span = setting(Span.parse("100%"), END)
    floor: float = setting(0.01, FLOOR, above=0, high=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InverseSqrt:
    """Warm-up, then the root of its length over that of the run so far; it needs no end."""

    name: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup: Span = setting(
        Span.parse("2%"), "steps of linear warm-up; four times as many steps halve the peak"
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """The warm-up says how slowly the rate falls, so there must be one."""
        if not self.warmup.amount:
            yield (
                "warmup",
                "the rate falls by the length of the warm-up: without one, to a tenth in 100 steps",
                "--config.schedule.warmup=2%",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Warm-up, then the peak, cut again and again."""

    name: Literal["step"] = "step"
    warmup: Span = setting(Span.parse("2%"), WARMUP)
    every: Span = setting(Span.parse("30%"), "steps between two cuts, from the end of the warm-up")
    factor: float = setting(0.1, "what is left by each cut", above=0, below=1)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Cuts are some steps apart."""
        if not self.every.amount:
            yield "every", "cuts are at least a step apart", "--config.schedule.every=30%"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneCycle:
    """Half a cosine up to the peak, and half a cosine down to almost nothing."""

    name: Literal["one_cycle"] = "one_cycle"
    warmup: Span = setting(Span.parse("30%"), "steps of the way up")
    end: Span = setting(Span.parse("100%"), END)
    start: float = setting(0.04, "first learning rate, as a share of the peak", low=0, high=1)
    floor: float = setting(4e-6, FLOOR, low=0, high=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wsd:
    """Warm-up, the peak for most of the run, and a decay at its end: warm-up, stable, decay."""

    name: Literal["wsd"] = "wsd"
    warmup: Span = setting(Span.parse("2%"), WARMUP)
    end: Span = setting(Span.parse("100%"), END)
    decay: Span = setting(Span.parse("20%"), "steps before the end in which it falls")
    shape: Literal["sqrt", "linear"] = setting(
        "sqrt", "how it falls with the share s of the decay: 1 - sqrt(s), or 1 - s"
    )
    floor: float = setting(0.0, FLOOR, low=0, high=1)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """There is a decay; without one this is `constant`."""
        if not self.decay.amount:
            yield "decay", "nothing decays in no steps", "--config.schedule.decay=20%"


Schedule = (
    Cosine | Linear | Constant | Polynomial | Exponential | InverseSqrt | Step | OneCycle | Wsd
)


def spans(schedule: Schedule) -> dict[str, Span]:
    """Its settings that are spans of the run, by name."""
    found = {field.name: getattr(schedule, field.name) for field in dataclasses.fields(schedule)}
    return {name: value for name, value in found.items() if isinstance(value, Span)}


def problems(
    schedule: Schedule, total: int, tokens_per_step: int | Paced
) -> Iterator[tuple[str, str, str]]:
    """What is wrong with a schedule on a run of `total` steps: (setting, why, fix).

    An end beyond the run in steps or tokens is none: the run may be the first part of a longer one. See `course.cautions`.
    """
    found = spans(schedule)
    for name, span in found.items():
        default = spans(type(schedule)())[name]
        fix = f"--config.schedule.{name}={default}"
        if span.unit == "second":
            fix = f"jaxlm config explain schedule.{name}"
            yield name, f"a schedule cannot be a time such as {span}", fix
        elif span.unit == "share" and span.amount > 1:
            yield name, f"{span} is more than the whole run", fix
    # Parts of one step are one step each: it has no course that could be wrong.
    if total == 1 or any(span.unit == "second" for span in found.values()):
        return
    steps = {name: span.steps(total, tokens_per_step) for name, span in found.items()}
    warmup, end = steps["warmup"], steps.get("end", total)
    usual = Span.parse("2%")
    if warmup >= end:
        ends = (
            f"the schedule ends: {warmup} steps, end at step {end}"
            if "end" in steps
            else f"the run ends: {warmup} steps"
        )
        yield (
            "warmup",
            f"it is not over when {ends}, {total} steps in all",
            f"--config.schedule.warmup={usual if usual.steps(total, tokens_per_step) < end else end - 1}",
        )
    elif "decay" in steps and warmup + steps["decay"] > end:
        yield (
            "decay",
            f"{steps['decay']} steps of decay after {warmup} of warm-up do not end at step {end}",
            f"--config.schedule.decay={end - warmup}",
        )
    elif isinstance(schedule, Cosine) and (short := _shortest(schedule, end - warmup)) < 1:
        yield (
            "cycles",
            f"the first of {schedule.cycles} cycles in {end - warmup} steps would have {short:.2g}",
            f"--config.schedule.cycles={_most(schedule, end - warmup)}",
        )
    elif "every" in steps and warmup + steps["every"] > total:
        yield (
            "every",
            f"the first cut would come at step {warmup + steps['every']}, and the run ends at {total}",
            f"--config.schedule.every={total - warmup}",
        )


def cycle_starts(schedule: Cosine, length: int) -> list[int]:
    """The steps, of `length`, at which its cycles begin, and the end of the last.

    Cycle k of n is g^k as long as the first, for the growth g: it begins at (g^k - 1) / (g^n - 1) of the whole, in
    the limit k / n where g = 1.
    """
    sizes = [schedule.growth**k for k in range(schedule.cycles)]
    starts = [length * sum(sizes[:k]) / sum(sizes) for k in range(schedule.cycles + 1)]
    return [math.floor(start + 0.5) for start in starts]


def _shortest(schedule: Cosine, length: int) -> float:
    return length / sum(schedule.growth**k for k in range(schedule.cycles))


def _most(schedule: Cosine, length: int) -> int:
    """Return the number of cycles of `length` steps of which the first has one step at least."""
    count, total = 0, 1.0
    while total <= length:
        count += 1
        total += schedule.growth**count
    return count
