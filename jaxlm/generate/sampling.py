"""Drawing the next token."""

import dataclasses
import math
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

EXCLUDED = -jnp.inf


def draw(
    logits: Float[Array, "B V"],
    keys: Array,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Int[Array, "B"]:
    """One id a row, from softmax(logits / temperature) cut as `filtered` says; temperature 0 is the likeliest.

    Row b draws with keys[b], and so the same whatever rows are beside it.
    """
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # The likeliest at zero: a temperature near zero then sends the others to minus infinity, and none to NaN.
    below = logits.astype(jnp.float32) - jnp.max(logits, axis=-1, keepdims=True)
    tempered = below / max(temperature, float(jnp.finfo(jnp.float32).tiny))
    cut = filtered(tempered, top_k=top_k, top_p=top_p, min_p=min_p)
    return jax.vmap(jax.random.categorical)(keys, cut).astype(jnp.int32)


def filtered(
    logits: Float[Array, "B V"],
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Float[Array, "B V"]:
    """Logits with the excluded ids at minus infinity.

    `top_k` keeps the k largest. `top_p` then keeps the smallest set of likeliest ids whose probabilities, renormalised,
    reach p (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751, section 3.1). Both keep what equals the smallest
    that they keep. `min_p` keeps those whose probability is at least that share of the likeliest's (Nguyen et al. 2024,
    arXiv:2407.01082, section 3).
    """
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < least, EXCLUDED, logits)
    if top_p is not None and top_p < 1:
        ranked = jnp.sort(logits, axis=-1, descending=True)
        probability = jax.nn.softmax(ranked, axis=-1)
        before = (
            jnp.cumsum(probability, axis=-1) - probability
        )  # of the likelier ids; the likeliest always stays
        least = jnp.min(jnp.where(before < top_p, ranked, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, EXCLUDED, logits)
    if min_p:
        least = jnp.max(logits, axis=-1, keepdims=True) + math.log(min_p)
        logits = jnp.where(logits < least, EXCLUDED, logits)
    return logits


# What was said counts against being said again.


class History(NamedTuple):
    """The ids of each row so far."""

    is_there: Bool[Array, "B V"]  # in the prompt or behind it
    drawn: Int[Array, "B V"]  # how often, behind the prompt

    @classmethod
    def of(cls, prompts: Int[Array, "B P"], lengths: Int[Array, "B"], vocab: int) -> Self:
        """That of the prompts, of which the first `lengths` are real."""
        rows, longest = prompts.shape
        is_real = jnp.arange(longest)[None] < lengths[:, None]
        ids = jnp.where(is_real, prompts, vocab)
        row = jnp.arange(rows)[:, None]
        is_there = jnp.zeros((rows, vocab), bool).at[row, ids].set(True, mode="drop")
        return cls(is_there, jnp.zeros((rows, vocab), jnp.int32))

    def extended(self, ids: Int[Array, "B"], where: Bool[Array, "B"]) -> Self:
        """With one id more in some rows."""
        row = jnp.arange(ids.shape[0])
        is_there = self.is_there.at[row, ids].max(where)
        return type(self)(is_there, self.drawn.at[row, ids].add(where))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Penalties:
    """How logits change by what a row has said; these values change nothing.

    - repetition r: of an id in the prompt or behind it, positive logits are divided and negative ones multiplied by r
      (Keskar et al. 2019, arXiv:1909.05858, section 4.1).
    - presence a and frequency b: the logit of an id that was drawn n > 0 times falls by a + b n; the prompt does not count.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @property
    def is_any(self) -> bool:
        """Whether anything changes, so that there must be a history."""
        return self != Penalties()

    def __call__(self, logits: Float[Array, "B V"], history: History) -> Float[Array, "B V"]:
        """The logits from which the next id is drawn."""
        repeated = jnp.where(logits > 0, logits / self.repetition, logits * self.repetition)
        logits = jnp.where(history.is_there, repeated, logits)
        drawn = history.drawn.astype(logits.dtype)
        return logits - self.presence * (drawn > 0) - self.frequency * drawn
