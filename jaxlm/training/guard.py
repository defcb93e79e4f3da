"""Whether an update may be applied: decided on the device, before it is, and never by multiplying with zero.

A step is bad where its loss or gradient is not finite, or where either stands out of the last accepted ones. A bad step
leaves parameters and optimizer as they were, bit for bit, and is counted. So is a step whose gradient the loss scale of
float16 made too large, and counted apart: it says nothing of the run.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.training.config import GuardConfig

# Bits of a verdict; 0 is a good step.
LOSS_NOT_FINITE, GRAD_NOT_FINITE, LOSS_SPIKE, GRAD_SPIKE = 1, 2, 4, 8
STATE_NOT_FINITE = 16  # an update that overflowed though its gradient had not: found before a save
OVERFLOW = 32  # a finite loss whose gradient was not, at a loss scale that can be lowered
WORDS = {
    LOSS_NOT_FINITE: "loss not finite",
    GRAD_NOT_FINITE: "gradient not finite",
    LOSS_SPIKE: "loss spike",
    GRAD_SPIKE: "gradient spike",
    STATE_NOT_FINITE: "parameters or moments not finite",
    OVERFLOW: "gradient too large for the loss scale",
}

NORMAL_CONSISTENT = (
    1.4826  # median absolute deviation of a normal distribution -> its standard deviation
)
# Of the median: a window of nearly equal values must not make everything a spike. With 2 % or 10 % for norms, 7 and 6 of
# 2,000 steps of a healthy run were skipped, at 1.7 times a median that its level had left behind.
LEAST_SPREAD_LOSS, LEAST_SPREAD_NORM = 0.02, 0.2
LEVEL_SHIFT = 8  # gradient spikes in a row that are taken for a new level
# Without a scale, overflows are the guard's; and one that grew for ever would be infinite.
LEAST_SCALE, MOST_SCALE = 1.0, 2.0**24
WARM = 2  # the spike test begins when 1/WARM of the window is filled: fewer values tell the spread badly


class LossScale(NamedTuple):
    """What the loss is multiplied by, so that gradients do not vanish in float16."""

    factor: Float[Array, ""]
    steady: Int[Array, ""]  # steps with a finite gradient since it last moved
    overflows: Int[Array, ""]  # steps not applied because of it, in the whole run


class GuardState(NamedTuple):
    """What the guard remembers. Windows hold accepted values only, so they are always finite."""

    losses: Float[Array, "W"]
    norms: Float[Array, "W"]
    filled: Int[Array, ""]  # values accepted since the windows were last emptied
    skipped: Int[Array, ""]  # steps not applied, in the whole run
    in_a_row: Int[Array, ""]  # of them, since the last step that was
    scale: LossScale  # of float16; otherwise it stays as it began


def fresh(config: GuardConfig) -> GuardState:
    """Before the first step."""
    zero = jnp.zeros((), jnp.int32)
    window = jnp.zeros((config.window,), jnp.float32)
    scale = LossScale(jnp.float32(config.loss_scale), zero, zero)
    return GuardState(window, window, zero, zero, zero, scale)


def judge(
    guard: GuardState,
    loss: Float[Array, ""],
    norm: Float[Array, ""],
    config: GuardConfig,
    *,
    is_scaled: bool = False,
) -> tuple[Bool[Array, ""], Int[Array, ""], GuardState]:
    """(whether to apply the update, the verdict's bits, the guard after this step).

    A value is a spike above median + sigmas x max(1.4826 x median absolute deviation, a share of the median) of its window,
    once half of that is filled. Gradient spikes alone, 8 in a row, are a new level: that step is applied and the
    windows begin again. A loss that stays high is not: parameters went wrong, and only a rewind mends them.

    Where the loss `is_scaled`, `norm` is that of the gradient without the scale. A gradient that is not finite though the
    loss is halves the scale; so many steps without one double it. At a scale of 1 such a gradient is a bad step like any
    other.

    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2 (the scale, and its choice while training).
    """
    bad_loss, bad_norm = ~jnp.isfinite(loss), ~jnp.isfinite(norm)
    verdict = LOSS_NOT_FINITE * bad_loss + GRAD_NOT_FINITE * bad_norm
    filled = guard.filled
    if config.sigmas is not None:
        is_warm = filled >= config.window // WARM
        valid = jnp.minimum(filled, config.window)
        high_loss = is_warm & (loss > _limit(guard.losses, valid, config.sigmas, LEAST_SPREAD_LOSS))
        high_norm = is_warm & (norm > _limit(guard.norms, valid, config.sigmas, LEAST_SPREAD_NORM))
        is_shift = high_norm & ~high_loss & ~bad_norm & (guard.in_a_row >= LEVEL_SHIFT)
        high_norm &= ~is_shift
        filled = jnp.where(is_shift, 0, filled)
        verdict += LOSS_SPIKE * (high_loss & ~bad_loss) + GRAD_SPIKE * (high_norm & ~bad_norm)
    is_good = verdict == 0
    slot = filled % config.window
    verdict = verdict.astype(jnp.int32)
    judged = guard._replace(
        losses=_put(guard.losses, slot, loss, is_good),
        norms=_put(guard.norms, slot, norm, is_good),
        filled=filled + is_good,
        skipped=guard.skipped + ~is_good,
        in_a_row=jnp.where(is_good, 0, guard.in_a_row + 1),
    )
    if not is_scaled:
        return is_good, verdict, judged
    overflowed = bad_norm & ~bad_loss & (guard.scale.factor > LEAST_SCALE)
    scale = _moved(guard.scale, overflowed, ~bad_norm, config.loss_scale_growth)
    after = select(overflowed, guard, judged)._replace(scale=scale)
    return is_good, jnp.where(overflowed, OVERFLOW, verdict), after


def _moved(scale: LossScale, overflowed: Array, is_finite: Array, growth: int) -> LossScale:
    """The scale after a step."""
    steady = scale.steady + is_finite
    is_grown = steady >= growth
    factor = jnp.where(is_grown, jnp.minimum(scale.factor * 2, MOST_SCALE), scale.factor)
    return LossScale(
        factor=jnp.where(overflowed, jnp.maximum(scale.factor / 2, LEAST_SCALE), factor),
        steady=jnp.where(overflowed | is_grown, 0, steady),
        overflows=scale.overflows + overflowed,
    )


def select(is_good: Bool[Array, ""], new: Any, old: Any) -> Any:
    """The new tree or the old one, leaf by leaf; a value that is not finite in the one not chosen leaves no trace."""
    return jax.tree.map(lambda a, b: jnp.where(is_good, a, b), new, old)


def words(verdict: int) -> str:
    """A verdict for people, such as "loss not finite, gradient not finite"."""
    return ", ".join(text for bit, text in WORDS.items() if verdict & bit)


def _limit(
    window: Float[Array, "W"], valid: Int[Array, ""], sigmas: float, least: float
) -> Float[Array, ""]:
    middle = _median(window, valid)
    spread = NORMAL_CONSISTENT * _median(jnp.abs(window - middle), valid)
    return middle + sigmas * jnp.maximum(spread, least * jnp.abs(middle))


def _median(window: Float[Array, "W"], valid: Int[Array, ""]) -> Float[Array, ""]:
    """The lower median of the first `valid` values."""
    is_valid = jnp.arange(window.shape[0]) < valid
    ordered = jnp.sort(jnp.where(is_valid, window, jnp.inf))
    return ordered[jnp.maximum(valid - 1, 0) // 2]


def _put(
    window: Float[Array, "W"], slot: Int[Array, ""], value: Float[Array, ""], is_good: Array
) -> Float[Array, "W"]:
    return window.at[slot].set(jnp.where(is_good, value, window[slot]))
