"""Guessing what comes next from what was said before."""

from typing import NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

LONGEST = 3  # ids at the end of a row that are looked for further up


class Said(NamedTuple):
    """The ids of each row, the prompt and what follows it, without a gap; those from `length` on are padding."""

    ids: Int[Array, "B S"]
    length: Int[Array, "B"]

    @classmethod
    def of(cls, prompts: Int[Array, "B P"], lengths: Int[Array, "B"], more: int) -> Self:
        """That of the prompts, of which the first `lengths` are real, with room for `more` ids."""
        return cls(jnp.pad(prompts, ((0, 0), (0, more))), lengths)

    def extended(self, ids: Int[Array, "B"], where: Bool[Array, "B"]) -> Self:
        """With one id more in some rows."""
        row, size = jnp.arange(ids.shape[0]), self.ids.shape[1]
        place = jnp.where(where, self.length, size)
        return type(self)(self.ids.at[row, place].set(ids, mode="drop"), self.length + where)

    def guess(self, number: int) -> Int[Array, "B G"]:
        """So many ids that may come next: those that followed the last place at which the row's end stood before.

        The longest end is looked for, of up to LONGEST ids; what would reach beyond the row begins again behind that place,
        as a row that repeats itself does. Where the last id is new to the row, what is guessed means nothing.

        Source: Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding.
        """
        last = self.length[:, None] - 1
        place = jnp.arange(self.ids.shape[1], dtype=jnp.int32)[None]
        equal, matched = place < last, jnp.zeros_like(self.ids)
        for back in range(LONGEST):
            wanted = jnp.take_along_axis(self.ids, jnp.maximum(last - back, 0), axis=1)
            before = jnp.pad(self.ids, ((0, 0), (back, 0)), constant_values=-1)[:, : place.shape[1]]
            equal = equal & (before == wanted) & (last >= back)
            matched = matched + equal
        # The last of the longest.
        found = jnp.argmax(matched * place.shape[1] + place * (matched > 0), axis=1)[:, None]
        ahead = jnp.arange(number, dtype=jnp.int32)[None] % jnp.maximum(last - found, 1)
        return jnp.take_along_axis(self.ids, found + 1 + ahead, axis=1)
