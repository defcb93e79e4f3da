"""Sampling of the next token, and penalties on repeated tokens.

Example:
  >>> filter_logits(jnp.array([[1.0, 3.0, 2.0]]), top_k=2).tolist()
  [[-inf, 3.0, 2.0]]
"""

import dataclasses
import math
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.ops import gumbel

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
    """Return one id a row, drawn from softmax(logits / temperature) after `filter_logits`.

    Row b draws with keys[b], so its result does not depend on the other rows of the batch.

    Args:
      logits: logits of the next token.
      keys: one random key a row.
      temperature: divisor of the logits; 0 takes the likeliest id.
      top_k: draw from the k likeliest ids.
      top_p: draw from the likeliest ids that reach this probability together.
      min_p: draw from ids with at least this share of the top probability.
    """
    if temperature == 0:
        return likeliest(logits)
    # Shifted to a maximum of 0: a temperature near 0 then gives minus infinity, but never NaN.
    below = logits.astype(jnp.float32) - jnp.max(logits, axis=-1, keepdims=True)
    tempered = below / max(temperature, float(jnp.finfo(jnp.float32).tiny))
    cut = filter_logits(tempered, top_k=top_k, top_p=top_p, min_p=min_p)
    return likeliest(with_noise(cut, keys))


def likeliest(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """Return the first of the largest logits of each row; the last id of a row without numbers.

    Two reductions, since that of `argmax` is no loop over vectors on a CPU: 32,000 ids of 8 rows
    take 1.4 ms of a pass there.
    """
    vocab = logits.shape[-1]
    is_largest = logits == jnp.max(logits, axis=-1, keepdims=True)
    ids = jnp.where(is_largest, jnp.arange(vocab, dtype=jnp.int32), vocab - 1)
    return jnp.min(ids, axis=-1)


def with_noise(logits: Float[Array, "B V"], keys: Array) -> Float[Array, "B V"]:
    """Return the logits plus Gumbel noise of each row's key: the likeliest id is then a draw.

    It is the draw of `jax.random.categorical` with that key.
    """
    return gumbel.noise(keys, logits.shape[1]) + logits


def filter_logits(
    logits: Float[Array, "B V"],
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Float[Array, "B V"]:
    """Return the logits with excluded ids at minus infinity.

    `top_k` keeps the k largest. `top_p` then keeps the smallest set of likeliest ids whose
    renormalized probabilities reach p (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751,
    section 3.1). Both keep ties with the smallest logit kept. `min_p` keeps ids with at least that
    share of the top probability (Nguyen et al. 2024, arXiv:2407.01082, section 3).
    """
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < least, EXCLUDED, logits)
    if top_p is not None and top_p < 1:
        ranked = jnp.sort(logits, axis=-1, descending=True)
        probability = jax.nn.softmax(ranked, axis=-1)
        # The mass of likelier ids; it is 0 for the likeliest, which always stays.
        before = jnp.cumsum(probability, axis=-1) - probability
        least = jnp.min(jnp.where(before < top_p, ranked, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, EXCLUDED, logits)
    if min_p:
        least = jnp.max(logits, axis=-1, keepdims=True) + math.log(min_p)
        logits = jnp.where(logits < least, EXCLUDED, logits)
    return logits


class History(NamedTuple):
    """Ids that occurred in each row so far."""

    seen: Bool[Array, "B V"]  # in the prompt or after it
    drawn: Int[Array, "B V"]  # number of times drawn after the prompt

    @classmethod
    def of(cls, prompts: Int[Array, "B P"], lengths: Int[Array, "B"], vocab: int) -> Self:
        """Return the history of the prompts, the first `lengths` ids of each row."""
        rows, longest = prompts.shape
        is_real = jnp.arange(longest)[None] < lengths[:, None]
        ids = jnp.where(is_real, prompts, vocab)
        row = jnp.arange(rows)[:, None]
        seen = jnp.zeros((rows, vocab), bool).at[row, ids].set(True, mode="drop")
        return cls(seen, jnp.zeros((rows, vocab), jnp.int32))

    def extended(self, ids: Int[Array, "B"], where: Bool[Array, "B"]) -> Self:
        """Return the history with one more id in the rows selected by `where`."""
        row = jnp.arange(ids.shape[0])
        seen = self.seen.at[row, ids].max(where)
        return type(self)(seen, self.drawn.at[row, ids].add(where))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Penalties:
    """Penalties on the logits of ids that occurred in a row; the defaults change nothing.

    - repetition r: if the id is in the prompt or after it, positive logits are divided and negative
      logits multiplied by r (Keskar et al. 2019, arXiv:1909.05858, section 4.1).
    - presence a and frequency b: the logit of an id drawn n > 0 times falls by a + b n; occurrences
      in the prompt do not count.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @property
    def is_active(self) -> bool:
        """Return True if a penalty is active, so that the history is needed."""
        return self != Penalties()

    def __call__(self, logits: Float[Array, "B V"], history: History) -> Float[Array, "B V"]:
        """Return the logits from which the next id is drawn."""
        repeated = jnp.where(logits > 0, logits / self.repetition, logits * self.repetition)
        logits = jnp.where(history.seen, repeated, logits)
        drawn = history.drawn.astype(logits.dtype)
        return logits - self.presence * (drawn > 0) - self.frequency * drawn
