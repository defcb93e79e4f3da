"""Guard that skips updates: it decides on the device, and selects instead of multiplying by zero.

A step is bad if its loss or gradient is not finite, if either is a spike among the last accepted
ones, or if its batch has no trained token: then moments and weights would only decay. A bad step
leaves parameters and optimizer unchanged, bit for bit, and is counted. A step whose gradient
overflows because of the loss scale of float16 is skipped too, and counted separately: it is no sign
of a problem of the run.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.training.config import GuardConfig

# Bits of a verdict; 0 is a good step.
LOSS_NOT_FINITE, GRAD_NOT_FINITE, LOSS_SPIKE, GRAD_SPIKE = 1, 2, 4, 8
STATE_NOT_FINITE = 16  # the update overflowed, not its gradient; detected before a save
OVERFLOW = 32  # finite loss with a gradient that is not, at a loss scale that can be lowered
NO_WEIGHT = 64  # no slot of the batch has a loss
SPIKES = LOSS_SPIKE | GRAD_SPIKE
DESCRIPTIONS = {
    LOSS_NOT_FINITE: "loss not finite",
    GRAD_NOT_FINITE: "gradient not finite",
    LOSS_SPIKE: "loss spike",
    GRAD_SPIKE: "gradient spike",
    STATE_NOT_FINITE: "parameters or moments not finite",
    OVERFLOW: "gradient too large for the loss scale",
    NO_WEIGHT: "no trained token",
}

# Median absolute deviation of a normal distribution -> its standard deviation.
NORMAL_CONSISTENT = 1.4826
# Shares of the median: in a window of nearly equal values not every value is a spike. With 2% or
# 10% for norms, 7 and 6 of 2,000 steps of a healthy run were skipped, at 1.7 times the median of an
# earlier level.
MIN_SPREAD_LOSS, MIN_SPREAD_NORM = 0.02, 0.2
# Few files of another kind, as some in CRLF, are spikes whenever they are read. If they are skipped
# each time, the model never learns them, and their gradients grow. So spikes that recur raise the
# limits: each such share of the steps doubles them; some steps are added to the first of a run.
DOUBLING_SHARE, FIRST_STEPS = 0.002, 200
CLIPPED = 10  # times as far from the median is a norm a spike if the gradient is clipped
LEVEL_SHIFT = 8  # gradient spikes in a row that count as a new level
# At the minimum, the guard handles overflows; without a maximum the scale would become infinite.
MIN_SCALE, MAX_SCALE = 1.0, 2.0**24
WARM = 2  # the spike test starts at 1/WARM of a full window: fewer values estimate the spread badly


class LossScale(NamedTuple):
    """Factor on the loss, so that gradients do not vanish in float16."""

    factor: Float[Array, ""]
    steady: Int[Array, ""]  # steps with a finite gradient since the factor last changed
    overflows: Int[Array, ""]  # steps skipped because of the factor, in the whole run


class GuardState(NamedTuple):
    """State of the guard. Windows hold accepted values only, so they are always finite."""

    losses: Float[Array, "W"]
    norms: Float[Array, "W"]
    filled: Int[Array, ""]  # values accepted since the windows were last emptied
    skipped: Int[Array, ""]  # skipped steps, in the whole run
    # Skipped steps since the last applied one, but those of a sampled batch without a gradient.
    in_a_row: Int[Array, ""]
    scale: LossScale  # of float16; constant for other dtypes
    spikes: Int[Array, ""]  # steps skipped because of a spike alone, in the whole run
    shift: Int[Array, ""]  # gradient spikes in a row without another reason to skip a step


def init_guard(config: GuardConfig) -> GuardState:
    """State before the first step."""
    zero = jnp.zeros((), jnp.int32)
    window = jnp.zeros((config.window,), jnp.float32)
    scale = LossScale(jnp.float32(config.loss_scale), zero, zero)
    return GuardState(window, window, zero, zero, zero, scale, zero, zero)


def judge(
    guard: GuardState,
    loss: Float[Array, ""],
    norm: Float[Array, ""],
    config: GuardConfig,
    *,
    step: Int[Array, ""] | int | None,
    is_clipped: bool = False,
    is_empty: Bool[Array, ""] | bool = False,
    is_scaled: bool = False,
) -> tuple[Bool[Array, ""], Int[Array, ""], GuardState]:
    """Return (is the step good, bits of the verdict, the guard after this step).

    A value is a spike above

        median + sigmas x max(1.4826 x median absolute deviation, a share of the median)

    of its window, once half of the window is filled. The limit of the norm is 10 times as far from
    the median if the gradient is clipped, as a step is then no larger than usual. Each 0.2% of the
    steps that were spikes, without the last ones in a row, doubles both distances: spikes that
    recur are data. 8 gradient spikes in a row, with no other bad step between them, are a new
    level: the step is applied and the windows start again. A loss that stays high is no new level:
    the parameters are damaged, and only a rewind repairs them.

    With a loss scale, a gradient that is not finite at a finite loss halves the scale;
    `loss_scale_growth` steps without one double it. At a scale of 1 such a gradient is an ordinary
    bad step.

    Args:
      guard: the guard before this step.
      loss: loss of the step, without the scale.
      norm: norm of the gradient, without the scale.
      config: settings of the guard.
      step: completed steps of the run; None if skipped ones are no sign of its data, as the model
        samples it. Then a batch of weight 0 is none of those in a row.
      is_clipped: True if the optimizer limits the norm of the whole gradient.
      is_empty: True if the weight of the batch is 0.
      is_scaled: True if the loss was scaled.

    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2 (the scale, and its choice
    while training).
    """
    bad_loss, bad_norm = ~jnp.isfinite(loss), ~jnp.isfinite(norm)
    verdict = LOSS_NOT_FINITE * bad_loss + GRAD_NOT_FINITE * bad_norm + NO_WEIGHT * is_empty
    filled = guard.filled
    if config.sigmas is not None:
        is_warm = filled >= config.window // WARM
        valid = jnp.minimum(filled, config.window)
        earlier = jnp.maximum(guard.spikes - guard.in_a_row, 0)
        share = 0.0 if step is None else earlier / (step + FIRST_STEPS)
        sigmas = config.sigmas * jnp.exp2(share / DOUBLING_SHARE)
        high_loss = is_warm & (loss > _limit(guard.losses, valid, sigmas, MIN_SPREAD_LOSS))
        of_norms = sigmas * (CLIPPED if is_clipped else 1)
        high_norm = is_warm & (norm > _limit(guard.norms, valid, of_norms, MIN_SPREAD_NORM))
        is_shift = (verdict == 0) & high_norm & ~high_loss & (guard.shift >= LEVEL_SHIFT)
        high_norm &= ~is_shift
        filled = jnp.where(is_shift, 0, filled)
        verdict += LOSS_SPIKE * (high_loss & ~bad_loss) + GRAD_SPIKE * (high_norm & ~bad_norm)
    is_good = verdict == 0
    # Samples of equal rewards are counted by their rollouts, and no rewind gives them others.
    is_counted = jnp.asarray(step is not None) | (verdict != NO_WEIGHT)
    slot = filled % config.window
    verdict = verdict.astype(jnp.int32)
    is_spike = ~is_good & (verdict | SPIKES == SPIKES)
    shift = jnp.where(verdict == GRAD_SPIKE, guard.shift + 1, 0)
    judged = guard._replace(
        losses=_put(guard.losses, slot, loss, is_good),
        norms=_put(guard.norms, slot, norm, is_good),
        filled=filled + is_good,
        skipped=guard.skipped + ~is_good,
        in_a_row=jnp.where(is_good, 0, guard.in_a_row + is_counted),
        spikes=guard.spikes + is_spike,
        shift=jnp.where(is_counted, shift, guard.shift),
    )
    if not is_scaled:
        return is_good, verdict, judged
    overflowed = bad_norm & ~bad_loss & (guard.scale.factor > MIN_SCALE)
    scale = _moved(guard.scale, overflowed, ~bad_norm, config.loss_scale_growth)
    after = select(overflowed, guard, judged)._replace(scale=scale)
    return is_good, jnp.where(overflowed, OVERFLOW, verdict), after


def _moved(scale: LossScale, overflowed: Array, is_finite: Array, growth: int) -> LossScale:
    """Return the loss scale after a step."""
    steady = scale.steady + is_finite
    is_grown = steady >= growth
    factor = jnp.where(is_grown, jnp.minimum(scale.factor * 2, MAX_SCALE), scale.factor)
    return LossScale(
        factor=jnp.where(overflowed, jnp.maximum(scale.factor / 2, MIN_SCALE), factor),
        steady=jnp.where(overflowed | is_grown, 0, steady),
        overflows=scale.overflows + overflowed,
    )


def select(is_good: Bool[Array, ""], new: Any, old: Any) -> Any:
    """Select the new tree or the old one; values of the other tree, also NaN, have no effect."""
    return jax.tree.map(lambda a, b: jnp.where(is_good, a, b), new, old)


def describe_verdict(verdict: int) -> str:
    """Return a verdict as text, such as "loss not finite, gradient not finite"."""
    return ", ".join(text for bit, text in DESCRIPTIONS.items() if verdict & bit)


def _limit(
    window: Float[Array, "W"], valid: Int[Array, ""], sigmas: Float[Array, ""], min_spread: float
) -> Float[Array, ""]:
    middle = _median(window, valid)
    spread = NORMAL_CONSISTENT * _median(jnp.abs(window - middle), valid)
    return middle + sigmas * jnp.maximum(spread, min_spread * jnp.abs(middle))


def _median(window: Float[Array, "W"], valid: Int[Array, ""]) -> Float[Array, ""]:
    """Return the lower median of the first `valid` values."""
    is_valid = jnp.arange(window.shape[0]) < valid
    ordered = jnp.sort(jnp.where(is_valid, window, jnp.inf))
    return ordered[jnp.maximum(valid - 1, 0) // 2]


def _put(
    window: Float[Array, "W"], slot: Int[Array, ""], value: Float[Array, ""], is_good: Array
) -> Float[Array, "W"]:
    return window.at[slot].set(jnp.where(is_good, value, window[slot]))
