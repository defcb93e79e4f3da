"""Settings of the learning-rate schedules, their formulas, and conflicts with a run's length.

The formulas are for numpy and for jax.numpy; nothing here imports JAX.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from jaxlm.core.config import Span, setting
from jaxlm.core.errors import ConfigError
from jaxlm.core.span import Paced
from jaxlm.optim.average_config import Average, Swa

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
            why = "the warm-up sets the speed of the decay; without one, the rate drops to a tenth"
            yield "warmup", f"{why} in 100 steps", "--config.schedule.warmup=2%"


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
    of a longer one. See `cautions`.
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
    if warmup >= end:
        run_end = f"the run has {total} steps"
        limit = f"the schedule ends at step {end} of {total}" if "end" in steps else run_end
        default = Span.parse("2%")
        shorter = default if default.steps(total, tokens_per_step) < end else end - 1
        why = f"the warm-up has {warmup} steps, but {limit}"
        yield "warmup", why, f"--config.schedule.warmup={shorter}"
    elif "decay" in steps and warmup + steps["decay"] > end:
        parts_text = f"{warmup} steps of warm-up and {steps['decay']} of decay"
        why = f"{parts_text} do not fit before step {end}"
        yield "decay", why, f"--config.schedule.decay={end - warmup}"
    elif isinstance(schedule, Cosine) and (short := _first_cycle_steps(schedule, end - warmup)) < 1:
        length = end - warmup
        why = f"the first of {schedule.cycles} cycles in {length} steps has {short:.2g} steps"
        yield "cycles", why, f"--config.schedule.cycles={_max_cycles(schedule, length)}"
    elif "every" in steps and warmup + steps["every"] > total:
        why = f"the first cut is at step {warmup + steps['every']}, but the run ends at {total}"
        yield "every", why, f"--config.schedule.every={total - warmup}"


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


def lr_factor(
    config: Schedule, *, total: int, tokens_per_step: int | Paced, xp: Any
) -> Callable[[Any], Any]:
    """Return the function t -> learning rate over its peak, of the update after t completed ones.

    With warm-up W, end E, floor f and s = clip((t - W) / (E - W), 0, 1), the factor is

        t < W          (t + 1) / (W + 1)
        constant       1
        linear         1 + (f - 1) s
        cosine         f + (1 - f) (1 + cos(pi s)) / 2, with s in the cycle of t
        polynomial     f + (1 - f) (1 - s)^power
        exponential    f^s
        inverse_sqrt   sqrt((W + 1) / (t + 1))
        step           factor^floor((t - W) / every)
        wsd            1 + (f - 1) shape(r), with r = clip((t - E + decay) / decay, 0, 1)
        one_cycle      a + (1 - a) (1 - cos(pi t / W)) / 2 for t < W, then cosine, with the start a

    The first update is not zero, and step W is the first at the peak. With one cycle, cosine is
    nanoGPT's `get_lr` with the floor as `min_lr`.

    Args:
      total: steps of the run.
      tokens_per_step: tokens of a step, for spans in tokens.
      xp: module that computes: numpy or jax.numpy.

    Raises ConfigError if a span is a time, or the parts of the schedule do not fit the run.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5 (cosine, restarts; cycles begin
    at whole steps); Vaswani et al. 2017, arXiv:1706.03762, equation 3 (inverse_sqrt); Smith and
    Topin 2017, arXiv:1708.07120 (one_cycle; its lines are cosines here as in PyTorch, and momentum
    does not change); Hu et al. 2024, arXiv:2404.06395, section 4 (wsd), and Hägele et al. 2024,
    arXiv:2405.18392 (its decay by 1 - sqrt(r)).
    """
    for field, why, fix in problems(config, total, tokens_per_step):
        what, where = "the schedule does not fit the run", f"schedule.{field}"
        raise ConfigError(what, where=where, why=why, fix=fix)
    steps = {name: span.steps(total, tokens_per_step) for name, span in spans(config).items()}
    warmup = steps["warmup"]

    def factor(now: Any) -> Any:
        after = _after_warmup(config, steps, xp.maximum(now, warmup), xp)
        return xp.where(now < warmup, _during_warmup(config, warmup, now, xp), after)

    return factor


def cautions(
    config: Schedule, *, total: int, tokens_per_step: int | Paced
) -> Iterator[tuple[str, str, str]]:
    """Yield the settings beyond the end of a run, which may be intended: (setting, why, fix)."""
    end = spans(config).get("end")
    if end is None or end.steps(total, tokens_per_step) <= total:
        return
    last = lr_factor(config, total=total, tokens_per_step=tokens_per_step, xp=np)(float(total - 1))
    ends = f"the schedule ends at step {end.steps(total, tokens_per_step)} and the run at {total}"
    why = f"{ends}, whose last update has {last:.0%} of the peak learning rate"
    yield "end", why, "--config.schedule.end=100%"


def with_swa_cycles(
    average: Average | None,
    factor: Callable[[Any], Any],
    *,
    total: int,
    tokens_per_step: int | Paced,
    xp: Any,
) -> Callable[[Any], Any]:
    """Return `factor` with swa's cycles of the learning rate after its `begin`.

    In cycles of c updates, the factor of the update after t completed ones is
    high + (low - high) i / (c - 1), with i = (t - begin) mod c. Averages other than swa, and swa
    without `high`, do not change `factor`.

    Args:
      average: settings of the average.
      factor: function t -> learning rate over its peak, from `lr_factor`.
      total, tokens_per_step, xp: as in `lr_factor`.

    Source: Izmailov et al. 2018, arXiv:1803.05407, section 3.2; there i counts from 1, and no
    update has `high` itself.
    """
    if not isinstance(average, Swa) or average.high is None:
        return factor
    begin = average.begin.steps(total, tokens_per_step)
    every = average.every.steps(total, tokens_per_step)
    high, low = average.high, average.low

    def cyclic(now: Any) -> Any:
        position = (now - begin) % every
        in_cycle = high + (low - high) * position / max(every - 1, 1)
        return xp.where(now < begin, factor(now), in_cycle)

    return cyclic


def _during_warmup(config: Schedule, warmup: int, now: Any, xp: Any) -> Any:
    if isinstance(config, OneCycle):
        return 1 - (1 - config.start) * _half_cosine(now / max(warmup, 1), xp)
    return (now + 1) / (warmup + 1)


def _after_warmup(config: Schedule, steps: dict[str, int], now: Any, xp: Any) -> Any:
    """Return the factor after the warm-up."""
    warmup, end = steps["warmup"], steps.get("end", 0)

    def completed(begin: Any, end: Any) -> Any:
        """Return the share of the steps from `begin` to `end` that are completed, from 0 to 1."""
        return xp.clip((now - begin) / xp.maximum(end - begin, 1), 0.0, 1.0)

    match config:
        case Constant():
            return xp.ones_like(now)
        case InverseSqrt():
            return xp.sqrt((warmup + 1) / (now + 1))
        case Step():
            # Not the floor of a quotient, for which XLA multiplies by a rounded reciprocal.
            return config.factor ** xp.floor_divide(now - warmup, steps["every"])
        case Exponential():
            return config.floor ** completed(warmup, end)
        case LinearDecay():
            remaining = 1 - completed(warmup, end)
        case Polynomial():
            remaining = (1 - completed(warmup, end)) ** config.power
        case OneCycle():
            remaining = _half_cosine(completed(warmup, end), xp)
        case Wsd():
            share = completed(end - steps["decay"], end)
            remaining = 1 - (xp.sqrt(share) if config.shape == "sqrt" else share)
        case Cosine():
            remaining = _half_cosine(completed(*_cycle(config, warmup, end, now, xp)), xp)
    return config.floor + (1 - config.floor) * remaining


def _cycle(config: Cosine, warmup: int, end: int, now: Any, xp: Any) -> tuple[Any, Any]:
    """Return the first and the last step of the cycle of `now`."""
    starts = [warmup + start for start in cycle_starts(config, end - warmup)]
    cycle: tuple[Any, Any] = (starts[0], starts[1])
    for start, stop in itertools.pairwise(starts[1:]):
        is_past = now >= start
        cycle = xp.where(is_past, start, cycle[0]), xp.where(is_past, stop, cycle[1])
    return cycle


def _half_cosine(share: Any, xp: Any) -> Any:
    """Return half a period of a cosine, from 1 to 0."""
    return 0.5 * (1 + xp.cos(math.pi * share))
