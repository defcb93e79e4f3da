"""What was said counts against being said again."""

import dataclasses
from typing import NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


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
