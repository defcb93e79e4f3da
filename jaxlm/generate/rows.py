"""Sampling with settings of its own for each row of a batch.

The result of a row is that of `sampling.draw` with its settings. Costly parts, such as the sort of
`top_p`, run only if an active row needs them.
"""

import dataclasses
import math
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxlm.generate.sampling import EXCLUDED, History, likeliest, with_noise

ALL = np.uint32(2**32 - 1)  # a word of 32 ids that are allowed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings of a request, as in `GenerateConfig`; `bias` is added to logits of ids."""

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()


class RowSettings(NamedTuple):
    """Settings as arrays [B], or those of one row as scalars."""

    temperature: Any
    top_k: Any  # 0 for all
    top_p: Any  # 1 for all
    log_min_p: Any  # minus infinity for all
    repetition: Any
    presence: Any
    frequency: Any

    @classmethod
    def empty(cls, rows: int) -> Self:
        """Return greedy settings for `rows` rows."""
        return cls(*(jnp.full((rows,), value) for value in cls.of(Sampling(temperature=0))))

    @classmethod
    def of(cls, sampling: Sampling) -> Self:
        """Return the settings of one row, as scalars."""
        return cls(
            temperature=np.float32(sampling.temperature),
            top_k=np.int32(min(sampling.top_k or 0, 2**31 - 1)),
            top_p=np.float32(1 if sampling.top_p is None else sampling.top_p),
            log_min_p=np.float32(math.log(sampling.min_p) if sampling.min_p else -math.inf),
            repetition=np.float32(sampling.repetition),
            presence=np.float32(sampling.presence),
            frequency=np.float32(sampling.frequency),
        )


def penalized(
    logits: Float[Array, "B V"],
    history: History,
    settings: RowSettings,
    active: Bool[Array, "B"],
) -> Float[Array, "B V"]:
    """Return the logits after the penalties of each row, see `sampling.Penalties`."""
    repetition, presence, frequency = (
        each[:, None] for each in (settings.repetition, settings.presence, settings.frequency)
    )

    def changed() -> Array:
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        after = jnp.where(history.seen, repeated, logits)
        drawn = history.drawn.astype(logits.dtype)
        return after - presence * (drawn > 0) - frequency * drawn

    is_changed = (repetition != 1) | (presence != 0) | (frequency != 0)
    return jax.lax.cond(jnp.any(is_changed & active[:, None]), changed, lambda: logits)


def limited(logits: Float[Array, "B V"], allowed: UInt32[Array, "B W"]) -> Float[Array, "B V"]:
    """Return the logits with minus infinity for ids that a row does not allow.

    Bit i % 32 of word i // 32 is set if id i is allowed.
    """

    def changed() -> Array:
        ids = jnp.arange(logits.shape[-1], dtype=jnp.uint32)
        bits = allowed[:, ids // 32] & (jnp.uint32(1) << ids % 32)[None]
        return jnp.where(bits > 0, logits, EXCLUDED)

    return jax.lax.cond(jnp.any(allowed != ALL), changed, lambda: logits)


def draw_rows(
    logits: Float[Array, "B V"], keys: Array, settings: RowSettings, active: Bool[Array, "B"]
) -> Int[Array, "B"]:
    """Return an id for each row, drawn with its key; a row of temperature 0 takes the likeliest."""
    is_drawn = active & (settings.temperature > 0)

    def drawn() -> Array:
        below = logits - jnp.max(logits, axis=-1, keepdims=True)
        divisor = jnp.maximum(settings.temperature, jnp.finfo(jnp.float32).tiny)
        tempered = below / divisor[:, None]
        is_sorted = (settings.top_k > 0) | (settings.top_p < 1)
        cut = jax.lax.cond(
            jnp.any(is_drawn & is_sorted),
            lambda: _without_tail(tempered, settings),
            lambda: tempered,
        )
        least = jnp.max(cut, axis=-1) + settings.log_min_p
        cut = jnp.where(cut < least[:, None], EXCLUDED, cut)
        return jnp.where((settings.temperature > 0)[:, None], with_noise(cut, keys), logits)

    return likeliest(jax.lax.cond(jnp.any(is_drawn), drawn, lambda: logits))


def _without_tail(logits: Float[Array, "B V"], settings: RowSettings) -> Float[Array, "B V"]:
    """Apply `top_k`, then `top_p`, as `sampling.filter_logits` does."""
    vocab = logits.shape[-1]
    ranked = jnp.sort(logits, axis=-1, descending=True)
    count = jnp.where(settings.top_k > 0, jnp.minimum(settings.top_k, vocab), vocab)
    kth = jnp.take_along_axis(ranked, count[:, None] - 1, axis=-1)
    ranked = jnp.where(ranked < kth, EXCLUDED, ranked)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    top_p = settings.top_p[:, None]
    nucleus = jnp.min(jnp.where(before < top_p, ranked, jnp.inf), axis=-1, keepdims=True)
    least = jnp.maximum(kth, jnp.where(top_p < 1, nucleus, EXCLUDED))
    return jnp.where(logits < least, EXCLUDED, logits)
