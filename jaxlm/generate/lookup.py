"""Prompt lookup: guesses of the next tokens from repetitions in the row."""

from typing import NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

LONGEST = 3  # longest n-gram at the end of a row that is searched for


class Said(NamedTuple):
    """Ids of each row, prompt and continuation without a gap; ids from `length` on are padding."""

    ids: Int[Array, "B S"]
    length: Int[Array, "B"]

    @classmethod
    def of(cls, prompts: Int[Array, "B P"], lengths: Int[Array, "B"], more: int) -> Self:
        """Return the rows of the prompts, with room for `more` ids; `lengths` ids are real."""
        return cls(jnp.pad(prompts, ((0, 0), (0, more))), lengths)

    def extended(self, ids: Int[Array, "B"], where: Bool[Array, "B"]) -> Self:
        """Return the rows with one more id in those selected by `where`."""
        row, size = jnp.arange(ids.shape[0]), self.ids.shape[1]
        place = jnp.where(where, self.length, size)
        return type(self)(self.ids.at[row, place].set(ids, mode="drop"), self.length + where)

    def guess(self, number: int) -> Int[Array, "B G"]:
        """Guess the next `number` ids: those after the last earlier match of the row's end.

        The longest end of up to LONGEST ids is matched. A guess beyond the row's end continues
        right after the match, as in a row that repeats itself. If the last id is new to the row,
        the guess is arbitrary.

        Source: Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding.
        """
        last = self.length[:, None] - 1
        place = jnp.arange(self.ids.shape[1], dtype=jnp.int32)[None]
        equal, matched = place < last, jnp.zeros_like(self.ids)
        for back in range(LONGEST):
            suffix = jnp.take_along_axis(self.ids, jnp.maximum(last - back, 0), axis=1)
            before = jnp.pad(self.ids, ((0, 0), (back, 0)), constant_values=-1)[:, : place.shape[1]]
            equal = equal & (before == suffix) & (last >= back)
            matched = matched + equal
        # The last match among the longest.
        match = jnp.argmax(matched * place.shape[1] + place * (matched > 0), axis=1)[:, None]
        ahead = jnp.arange(number, dtype=jnp.int32)[None] % jnp.maximum(last - match, 1)
        return jnp.take_along_axis(self.ids, match + 1 + ahead, axis=1)
