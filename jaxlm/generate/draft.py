"""Drafts: guesses of the next ids of a row, which the model verifies in one pass.

A guess stands if it equals the id that the model draws with that position's key. The text is
therefore that without guesses, at any temperature. Guesses of a row depend on its own ids alone.
"""

from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from jaxlm.generate.decode import RowTokens

GUESSES = 4  # ids of a row that are guessed at a time


WINDOW = 2048  # passes of rows, over which time that is saved and lost is compared


class DraftBalance:
    """Compares the tokens that guesses add with the time that verifying them takes.

    Args:
      ratio: time of a pass that verifies guesses over that of a pass without.
    """

    def __init__(self, ratio: float):
        self.ratio = ratio
        self._passes = self._accepted = 0
        self.loss = ""

    def pays(self, passes: int, accepted: int) -> bool:
        """Count passes of rows and the guesses that stood; return False if time is lost."""
        self._passes += passes
        self._accepted += accepted
        if self._passes < WINDOW:
            return True
        tokens = 1 + self._accepted / self._passes
        self._passes = self._accepted = 0
        if tokens >= self.ratio:
            return True
        self.loss = (
            f"the draft is off: {tokens:.2f} tokens a pass, which takes {self.ratio:.2f} times as "
            "long as one without guesses"
        )
        return False


class Draft(Protocol):
    """A source of guesses; its state is a part of that of the slots."""

    @property
    def name(self) -> str:
        """The kind of draft."""

    @property
    def guesses(self) -> int:
        """Number of ids that are guessed at a time."""

    def empty(self, rows: int, length: int) -> Any:
        """Return the state of `rows` slots of `length` tokens."""

    def admit(self, state: Any, slot: Array, arrival: Any) -> Any:
        """Return the state with a request in a slot."""

    def guess(self, state: Any) -> Int[Array, "B G"]:
        """Return the guesses of each row."""

    def extended(self, state: Any, token: Int[Array, "B"], where: Bool[Array, "B"]) -> Any:
        """Return the state with one more id in some rows."""


class Lookup(NamedTuple):
    """Guesses the ids that followed the last occurrence of a row's end, see `RowTokens.guess`."""

    guesses: int = GUESSES
    name: str = "lookup"

    def empty(self, rows: int, length: int) -> RowTokens:
        return RowTokens(jnp.zeros((rows, length), jnp.int32), jnp.zeros((rows,), jnp.int32))

    def admit(self, state: RowTokens, slot: Array, arrival: Any) -> RowTokens:
        ids = state.ids.at[slot].set(arrival.ids)
        return RowTokens(ids, state.length.at[slot].set(arrival.count))

    def guess(self, state: RowTokens) -> Int[Array, "B G"]:
        return state.guess(self.guesses)

    def extended(
        self, state: RowTokens, token: Int[Array, "B"], where: Bool[Array, "B"]
    ) -> RowTokens:
        return state.extended(token, where)
