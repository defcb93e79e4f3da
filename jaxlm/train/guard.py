"""Whether an update may be applied: decided on the device, before it is, and never by multiplying with zero.

A step is bad where its loss or gradient is not finite, or where either stands out of the last accepted ones. A bad step
leaves parameters and optimizer as they were, bit for bit, and is counted.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.train.config import GuardConfig

# Bits of a verdict; 0 is a good step.
LOSS_NOT_FINITE, GRAD_NOT_FINITE, LOSS_SPIKE, GRAD_SPIKE = 1, 2, 4, 8
STATE_NOT_FINITE = 16  # an update that overflowed though its gradient had not: found before a save
WORDS = {
    LOSS_NOT_FINITE: "loss not finite",
    GRAD_NOT_FINITE: "gradient not finite",
    LOSS_SPIKE: "loss spike",
    GRAD_SPIKE: "gradient spike",
    STATE_NOT_FINITE: "parameters or moments not finite",
}

NORMAL_CONSISTENT = (
    1.4826  # median absolute deviation of a normal distribution -> its standard deviation
)
# Of the median: a window of nearly equal values must not make everything a spike. With 2 % or 10 % for norms, 7 and 6 of
# 2,000 steps of a healthy run were skipped, at 1.7 times a median that its level had left behind.
LEAST_SPREAD_LOSS, LEAST_SPREAD_NORM = 0.02, 0.2
LEVEL_SHIFT = 8  # gradient spikes in a row that are taken for a new level
WARM = 2  # the spike test begins when 1/WARM of the window is filled: fewer values tell the spread badly


class GuardState(NamedTuple):
    """What the guard remembers. Windows hold accepted values only, so they are always finite."""

    losses: Float[Array, "W"]
    norms: Float[Array, "W"]
    filled: Int[Array, ""]  # values accepted since the windows were last emptied
    skipped: Int[Array, ""]  # steps not applied, in the whole run
    in_a_row: Int[Array, ""]  # of them, since the last step that was


def fresh(config: GuardConfig) -> GuardState:
    """Before the first step."""
    zero = jnp.zeros((), jnp.int32)
    window = jnp.zeros((config.window,), jnp.float32)
    return GuardState(window, window, zero, zero, zero)


def judge(
    guard: GuardState,
    loss: Float[Array, ""],
    norm: Float[Array, ""],
    config: GuardConfig,
) -> tuple[Bool[Array, ""], Int[Array, ""], GuardState]:
    """(whether to apply the update, the verdict's bits, the guard after this step).

    A value is a spike above median + sigmas x max(1.4826 x median absolute deviation, a share of the median) of its window,
    once half of that is filled. Gradient spikes alone, 8 in a row, are a new level: that step is applied and the
    windows begin again. A loss that stays high is not: parameters went wrong, and only a rewind mends them.
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
    return (
        is_good,
        verdict.astype(jnp.int32),
        GuardState(
            losses=_put(guard.losses, slot, loss, is_good),
            norms=_put(guard.norms, slot, norm, is_good),
            filled=filled + is_good,
            skipped=guard.skipped + ~is_good,
            in_a_row=jnp.where(is_good, 0, guard.in_a_row + 1),
        ),
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
