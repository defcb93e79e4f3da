"""The course of the learning rate, as formulas for numpy and jax.numpy alike. Free of JAX."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.span import Paced
from jaxlm.optim.average_config import Average, Swa
from jaxlm.optim.schedule_config import (
    Constant,
    Cosine,
    Exponential,
    InverseSqrt,
    Linear,
    OneCycle,
    Polynomial,
    Schedule,
    Step,
    Wsd,
    cycle_starts,
    problems,
    spans,
)


def course(
    config: Schedule, *, total: int, tokens_per_step: int | Paced, xp: Any
) -> Callable[[Any], Any]:
    """The learning rate over its peak, of the update that follows so many completed ones.

    `xp` is the module that computes: numpy, or jax.numpy. After t updates, with warm-up W, end E, floor f and
    s = clip((t - W) / (E - W), 0, 1), it is

        t < W          (t + 1) / (W + 1)
        constant       1
        linear         1 + (f - 1) s
        cosine         f + (1 - f) (1 + cos(pi s)) / 2, with s of the cycle that t lies in
        polynomial     f + (1 - f) (1 - s)^power
        exponential    f^s
        inverse_sqrt   sqrt((W + 1) / (t + 1))
        step           factor^floor((t - W) / every)
        wsd            1 + (f - 1) shape(r), with r = clip((t - E + decay) / decay, 0, 1)
        one_cycle      a + (1 - a) (1 - cos(pi t / W)) / 2 for t < W, then cosine, with the start a

    The first update is not zero, and step W is the first at the peak. With one cosine this is nanoGPT's `get_lr` with
    `min_lr` the floor.

    Raises:
      ConfigError: where a span is a time, or the parts of the schedule do not fit the run.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5 (cosine, restarts; cycles begin at whole steps);
    Vaswani et al. 2017, arXiv:1706.03762, equation 3 (inverse_sqrt); Smith and Topin 2017, arXiv:1708.07120 (one_cycle,
    whose lines are cosines here as in PyTorch's, and whose momentum stays as it is); Hu et al. 2024, arXiv:2404.06395,
    section 4 (wsd), and Hägele et al. 2024, arXiv:2405.18392 (its decay by 1 - sqrt(r)).
    """
    for field, why, fix in problems(config, total, tokens_per_step):
        raise ConfigError(
            "the schedule does not fit the run", where=f"schedule.{field}", why=why, fix=fix
        )
    steps = {name: span.steps(total, tokens_per_step) for name, span in spans(config).items()}
    warmup = steps["warmup"]

    def factor(now: Any) -> Any:
        after = _falling(config, steps, xp.maximum(now, warmup), xp)
        return xp.where(now < warmup, _rising(config, warmup, now, xp), after)

    return factor


def cautions(
    config: Schedule, *, total: int, tokens_per_step: int | Paced
) -> Iterator[tuple[str, str, str]]:
    """What of a schedule the run does not reach, though that may be meant: (setting, why, fix)."""
    end = spans(config).get("end")
    if end is None or end.steps(total, tokens_per_step) <= total:
        return
    last = course(config, total=total, tokens_per_step=tokens_per_step, xp=np)(float(total - 1))
    yield (
        "end",
        f"the schedule ends at step {end.steps(total, tokens_per_step)} and the run at {total}, "
        f"whose last update has {last:.0%} of the peak learning rate",
        "--config.schedule.end=100%",
    )


def averaged(
    average: Average | None,
    factor: Callable[[Any], Any],
    *,
    total: int,
    tokens_per_step: int | Paced,
    xp: Any,
) -> Callable[[Any], Any]:
    """A course that from swa's `begin` on is that of its cycles of c updates, where it has a rate of its own.

    Of the update that follows t completed ones it is then high + (low - high) i / (c - 1), with i = (t - begin) mod c.

    Source: Izmailov et al. 2018, arXiv:1803.05407, section 3.2; there i counts from 1, and no update has `high` itself.
    """
    if not isinstance(average, Swa) or average.high is None:
        return factor
    begin = average.begin.steps(total, tokens_per_step)
    every = average.every.steps(total, tokens_per_step)
    high, low = average.high, average.low

    def cyclic(now: Any) -> Any:
        place = (now - begin) % every
        return xp.where(now < begin, factor(now), high + (low - high) * place / max(every - 1, 1))

    return cyclic


def _rising(config: Schedule, warmup: int, now: Any, xp: Any) -> Any:
    if isinstance(config, OneCycle):
        return 1 - (1 - config.start) * _half_cosine(now / max(warmup, 1), xp)
    return (now + 1) / (warmup + 1)


def _falling(config: Schedule, steps: dict[str, int], now: Any, xp: Any) -> Any:
    """What follows the warm-up."""
    warmup, end = steps["warmup"], steps.get("end", 0)

    def gone(begin: Any, end: Any) -> Any:
        """How much of the way from one step to another, from 0 to 1."""
        return xp.clip((now - begin) / xp.maximum(end - begin, 1), 0.0, 1.0)

    match config:
        case Constant():
            return xp.ones_like(now)
        case InverseSqrt():
            return xp.sqrt((warmup + 1) / (now + 1))
        case Step():
            return config.factor ** xp.floor((now - warmup) / steps["every"])
        case Exponential():
            return config.floor ** gone(warmup, end)
        case Linear():
            left = 1 - gone(warmup, end)
        case Polynomial():
            left = (1 - gone(warmup, end)) ** config.power
        case OneCycle():
            left = _half_cosine(gone(warmup, end), xp)
        case Wsd():
            share = gone(end - steps["decay"], end)
            left = 1 - (xp.sqrt(share) if config.shape == "sqrt" else share)
        case Cosine():
            left = _half_cosine(gone(*_cycle(config, warmup, end, now, xp)), xp)
    return config.floor + (1 - config.floor) * left


def _cycle(config: Cosine, warmup: int, end: int, now: Any, xp: Any) -> tuple[Any, Any]:
    """The first and the last step of the cycle that `now` lies in."""
    starts = [warmup + start for start in cycle_starts(config, end - warmup)]
    found: tuple[Any, Any] = (starts[0], starts[1])
    for start, stop in itertools.pairwise(starts[1:]):
        is_past = now >= start
        found = xp.where(is_past, start, found[0]), xp.where(is_past, stop, found[1])
    return found


def _half_cosine(share: Any, xp: Any) -> Any:
    """From 1 down to 0."""
    return 0.5 * (1 + xp.cos(math.pi * share))
