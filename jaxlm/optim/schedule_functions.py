"""Formulas of the learning-rate schedules, for numpy and for jax.numpy. Free of JAX."""

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
    LinearDecay,
    OneCycle,
    Polynomial,
    Schedule,
    Step,
    Wsd,
    cycle_starts,
    problems,
    spans,
)


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
      config: settings of the schedule.
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
        raise ConfigError(
            "the schedule does not fit the run", where=f"schedule.{field}", why=why, fix=fix
        )
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
    yield (
        "end",
        f"the schedule ends at step {end.steps(total, tokens_per_step)} and the run at {total}, "
        f"whose last update has {last:.0%} of the peak learning rate",
        "--config.schedule.end=100%",
    )


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
      total: steps of the run.
      tokens_per_step: tokens of a step, for spans in tokens.
      xp: module that computes: numpy or jax.numpy.

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
        return xp.where(
            now < begin, factor(now), high + (low - high) * position / max(every - 1, 1)
        )

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
            return config.factor ** xp.floor((now - warmup) / steps["every"])
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
