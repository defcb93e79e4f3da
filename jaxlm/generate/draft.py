"""Drafts: guesses of the next ids of a row, which the model verifies in one pass.

A guess stands if it equals the id that the model draws with that position's key. The text is
therefore that without guesses, at any temperature. Guesses of a row depend on its own ids alone.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from jaxlm.generate import decode
from jaxlm.generate.config import GUESSES
from jaxlm.generate.decode import RowTokens
from jaxlm.generate.reading import read_chunk, read_next
from jaxlm.generate.rows import draw_rows, penalized
from jaxlm.models.build import Blueprint
from jaxlm.models.decoder import Decoder
from jaxlm.nn.cache import KVCache

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

    def weights(self) -> list[Array]:
        """Return the arrays that the functions below get as `weights`."""

    def empty(self, rows: int, length: int, chunk: int, block: int | None) -> Any:
        """Return the state of `rows` slots of `length` tokens, see `slots.build`."""

    def admit(self, state: Any, slot: Array, arrival: Any) -> Any:
        """Return the state with a request in a slot."""

    def read(
        self, weights: list[Array], slots: Any, slot: Array, ids: Array, start: Array, count: Array
    ) -> Any:
        """Return the state after a chunk of a prompt, see `reading.read_chunk`.

        Args: as there; `slots` is the state of all slots.
        """

    def guess(self, weights: list[Array], slots: Any, active: Array) -> tuple[Array, Any]:
        """Return the guesses [B, G] of active rows, and the state."""

    def extended(self, state: Any, token: Int[Array, "B"], where: Bool[Array, "B"]) -> Any:
        """Return the state with one more id in some rows."""

    def caches(self, state: Any) -> dict[str, tuple[Any, ...]]:
        """Return the KV caches of the state, which are kept with prefixes."""

    def with_caches(self, state: Any, layers: dict[str, tuple[Any, ...]]) -> Any:
        """Return the state with other KV caches."""


class Lookup(NamedTuple):
    """Guesses the ids that followed the last occurrence of a row's end, see `RowTokens.guess`."""

    guesses: int = GUESSES
    name: str = "lookup"

    def weights(self) -> list[Array]:
        return []

    def empty(self, rows: int, length: int, chunk: int, block: int | None) -> RowTokens:
        return RowTokens(jnp.zeros((rows, length), jnp.int32), jnp.zeros((rows,), jnp.int32))

    def admit(self, state: RowTokens, slot: Array, arrival: Any) -> RowTokens:
        ids = state.ids.at[slot].set(arrival.ids)
        return RowTokens(ids, state.length.at[slot].set(arrival.count))

    def read(self, weights: list[Array], slots: Any, *chunk: Array) -> RowTokens:
        return slots.draft

    def guess(
        self, weights: list[Array], slots: Any, active: Array
    ) -> tuple[Int[Array, "B G"], RowTokens]:
        return slots.draft.guess(self.guesses), slots.draft

    def extended(
        self, state: RowTokens, token: Int[Array, "B"], where: Bool[Array, "B"]
    ) -> RowTokens:
        return state.extended(token, where)

    def caches(self, state: RowTokens) -> dict[str, tuple[Any, ...]]:
        return {}

    def with_caches(self, state: RowTokens, layers: dict[str, tuple[Any, ...]]) -> RowTokens:
        return state


class DraftModel:
    """Guesses what a smaller model draws with the same keys; its state is its KV cache.

    Both draw by Gumbel noise of one key, so they agree nearly as often as any sampling of two
    distributions allows.

    Args:
      blueprint: the smaller model, a decoder of the same ids.
      params: its parameters.
      guesses: ids that are guessed at a time.
    """

    name = "run"

    def __init__(self, blueprint: Blueprint, params: Any, guesses: int = GUESSES):
        self.guesses = guesses
        relayout, self._merged = decode.weight_layout(blueprint.merge)
        ready = jax.jit(relayout)(params) if decode.needs_relayout() else relayout(params)
        self._weights, self._layout = jax.tree.flatten(ready)

    def _model(self, weights: list[Array]) -> Decoder:
        model = self._merged(jax.tree.unflatten(self._layout, weights))
        assert isinstance(model, Decoder)
        return model

    def weights(self) -> list[Array]:
        return self._weights

    def empty(self, rows: int, length: int, chunk: int, block: int | None) -> Any:
        model = self._model(self._weights)
        slots = length + -self.guesses % chunk
        return model.empty_cache(rows, slots, spare=self.guesses, block=block).layers

    def admit(self, state: Any, slot: Array, arrival: Any) -> Any:
        return state

    def read(self, weights: list[Array], slots: Any, *chunk: Array) -> Any:
        cache = slots.cache._replace(layers=slots.draft)
        return read_chunk(self._model(weights), cache, *chunk)[0].layers

    def guess(self, weights: list[Array], slots: Any, active: Array) -> tuple[Array, Any]:
        model = self._model(weights)
        keys = jax.random.wrap_key_data(slots.keys)

        def step(place: Array, carry: Any) -> Any:
            cache, token, history, guessed = carry
            cache, raw = read_next(model, cache, active, token[:, None])
            logits = penalized(raw[:, 0], history, slots.settings, active) + slots.bias
            folded = jax.vmap(jax.random.fold_in)(keys, slots.drawn + place)
            token = draw_rows(logits, folded, slots.settings, active)
            cache = cache._replace(length=cache.length + active)
            return cache, token, history.extended(token, active), guessed.at[:, place].set(token)

        # The last step reads the last guess, whose key and value are needed if all of them stand.
        places = self.guesses + 1
        guessed = jnp.zeros((len(active), places), jnp.int32)
        cache = KVCache(slots.draft, slots.cache.length)
        carry = (cache, slots.token, slots.history, guessed)
        cache, _, _, guessed = jax.lax.fori_loop(0, places, step, carry)
        return guessed[:, :-1], cache.layers

    def extended(self, state: Any, token: Int[Array, "B"], where: Bool[Array, "B"]) -> Any:
        return state

    def caches(self, state: Any) -> dict[str, tuple[Any, ...]]:
        return state

    def with_caches(self, state: Any, layers: dict[str, tuple[Any, ...]]) -> Any:
        return layers
