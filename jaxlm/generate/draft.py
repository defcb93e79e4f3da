"""Drafts: guesses of the next ids of a row, which the model verifies in one pass.

A guess stands if it equals the id that the model draws with that position's key. The text is
therefore that without guesses, at any temperature. Guesses of a row depend on its own ids alone.
"""

from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxlm.generate import decode
from jaxlm.generate.config import GUESSES
from jaxlm.generate.reading import read_chunk, read_next
from jaxlm.generate.rows import draw_rows, penalized
from jaxlm.models.build import Blueprint
from jaxlm.models.decoder import Decoder, cache_mask
from jaxlm.nn.attention import LayerInputs
from jaxlm.nn.cache import AnyCache, KVCache, LayerCache

MAX_NGRAM = 3  # longest n-gram at the end of a row that is searched for


class Sources(NamedTuple):
    """Inputs of a guess: the model, and the arrays that the draft has itself."""

    model: Decoder
    weights: list[Array]


class Draft(Protocol):
    """A source of guesses; its state is a part of that of the slots."""

    @property
    def name(self) -> str:
        """The kind of draft."""

    @property
    def guesses(self) -> int:
        """Number of ids that are guessed at a time."""

    @property
    def is_reader(self) -> bool:
        """True if guesses need that `follow` has read all ids but the newest."""

    @property
    def has_stream(self) -> bool:
        """True if guesses need `seen`, whose stream takes the last layer of the model."""

    @property
    def reread(self) -> int:
        """Number of the newest ids that `guess` reads itself, if `follow` has not."""

    def weights(self) -> list[Array]:
        """Return the arrays of `Sources.weights`."""

    def empty(self, model: Decoder, rows: int, length: int, block: int | None) -> Any:
        """Return the state of `rows` slots of `length` tokens.

        Args:
          model: the model.
          rows, length: as in `slots.build`.
          block: slots of a block of a KV cache, see `Backbone.empty_cache`.
        """

    def admit(self, state: Any, slot: Array, arrival: Any) -> Any:
        """Return the state with a request in a slot."""

    def seen(self, state: Any, slot: Array, start: Array, stream: Float[Array, "1 C D"]) -> Any:
        """Return the state after the model has read a chunk of a prompt."""

    def follow(
        self, sources: Sources, slots: Any, slot: Array, ids: Array, start: Array, count: Array
    ) -> Any:
        """Return the state after the draft has read a chunk too, see `slots.Programs.follow`.

        Args: as there; `slots` is the state of all slots.
        """

    def guess(self, sources: Sources, slots: Any, active: Array) -> tuple[Array, Any]:
        """Return the guesses [B, G] of active rows, and the state."""

    def extended(
        self,
        state: Any,
        token: Int[Array, "B"],
        stream: Float[Array, "B D"],
        where: Bool[Array, "B"],
    ) -> Any:
        """Return the state with one more id in some rows, and the stream it was drawn from."""

    def caches(self, state: Any) -> dict[str, tuple[Any, ...]]:
        """Return the KV caches of the state, which are kept with prefixes."""

    def with_caches(self, state: Any, layers: dict[str, tuple[Any, ...]]) -> Any:
        """Return the state with other KV caches."""


class RowTokens(NamedTuple):
    """Ids of each row, prompt and continuation without a gap; ids from `length` on are padding."""

    ids: Int[Array, "B S"]
    length: Int[Array, "B"]

    def extended(self, ids: Int[Array, "B"], where: Bool[Array, "B"]) -> Self:
        """Return the rows with one more id in those selected by `where`."""
        row, size = jnp.arange(ids.shape[0]), self.ids.shape[1]
        place = jnp.where(where, self.length, size)
        return type(self)(self.ids.at[row, place].set(ids, mode="drop"), self.length + where)

    def guess(self, number: int) -> Int[Array, "B G"]:
        """Guess the next `number` ids: those after the last earlier match of the row's end.

        The longest end of up to MAX_NGRAM ids is matched. A guess beyond the row's end continues
        right after the match, as in a row that repeats itself. If the last id is new to the row,
        the guess is arbitrary.

        Source: Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding.
        """
        last = self.length[:, None] - 1
        place = jnp.arange(self.ids.shape[1], dtype=jnp.int32)[None]
        equal, matched = place < last, jnp.zeros_like(self.ids)
        for back in range(MAX_NGRAM):
            suffix = jnp.take_along_axis(self.ids, jnp.maximum(last - back, 0), axis=1)
            before = jnp.pad(self.ids, ((0, 0), (back, 0)), constant_values=-1)[:, : place.shape[1]]
            equal = equal & (before == suffix) & (last >= back)
            matched = matched + equal
        # The last match among the longest.
        match = jnp.argmax(matched * place.shape[1] + place * (matched > 0), axis=1)[:, None]
        ahead = jnp.arange(number, dtype=jnp.int32)[None] % jnp.maximum(last - match, 1)
        return jnp.take_along_axis(self.ids, match + 1 + ahead, axis=1)


class Lookup(NamedTuple):
    """Guesses the ids that followed the last occurrence of a row's end, see `RowTokens.guess`."""

    guesses: int = GUESSES
    name: str = "lookup"
    is_reader: bool = False
    has_stream: bool = False
    reread: int = 0

    def weights(self) -> list[Array]:
        return []

    def empty(self, model: Decoder, rows: int, length: int, block: int | None) -> RowTokens:
        return RowTokens(jnp.zeros((rows, length), jnp.int32), jnp.zeros((rows,), jnp.int32))

    def admit(self, state: RowTokens, slot: Array, arrival: Any) -> RowTokens:
        ids = state.ids.at[slot].set(arrival.ids)
        return RowTokens(ids, state.length.at[slot].set(arrival.count))

    def seen(self, state: RowTokens, slot: Array, start: Array, stream: Array) -> RowTokens:
        return state

    def follow(self, sources: Sources, slots: Any, *chunk: Array) -> RowTokens:
        return slots.draft

    def guess(
        self, sources: Sources, slots: Any, active: Array
    ) -> tuple[Int[Array, "B G"], RowTokens]:
        return slots.draft.guess(self.guesses), slots.draft

    def extended(self, state: RowTokens, token: Array, stream: Array, where: Array) -> RowTokens:
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

    name, is_reader, has_stream, reread = "run", True, False, 0

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

    def empty(self, model: Decoder, rows: int, length: int, block: int | None) -> Any:
        model = self._model(self._weights)
        return model.empty_cache(rows, length, spare=self.guesses, block=block).layers

    def admit(self, state: Any, slot: Array, arrival: Any) -> Any:
        return state

    def seen(self, state: Any, slot: Array, start: Array, stream: Array) -> Any:
        return state

    def follow(
        self, sources: Sources, slots: Any, slot: Array, ids: Array, start: Array, count: Array
    ) -> Any:
        cache = slots.cache._replace(layers=slots.draft)
        chunk = ids[: len(ids) - self.guesses]
        model = self._model(sources.weights)
        return read_chunk(model, cache, slot, chunk, start, count)[0].layers

    def guess(self, sources: Sources, slots: Any, active: Array) -> tuple[Array, Any]:
        model = self._model(sources.weights)
        keys = jax.random.wrap_key_data(slots.keys)

        def step(place: Array, carry: Any) -> Any:
            cache, token, history, guessed = carry
            cache, hidden = read_next(model, cache, active, token[:, None])
            raw = model.logits(hidden.values)[:, 0]
            logits = penalized(raw, history, slots.settings, active) + slots.bias
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

    def extended(self, state: Any, token: Array, stream: Array, where: Array) -> Any:
        return state

    def caches(self, state: Any) -> dict[str, tuple[Any, ...]]:
        return state

    def with_caches(self, state: Any, layers: dict[str, tuple[Any, ...]]) -> Any:
        return layers


class HeadsState(NamedTuple):
    """The ids of each row, the stream at each id that the model has read, and each head's cache."""

    tokens: RowTokens
    stream: LayerCache  # its keys, of one head as wide as the model
    heads: tuple[AnyCache, ...]


class DraftHeads:
    """Guesses the next ids with the heads of `objective.name=mtp`, one guess each.

    At the newest id that the model has read, head k predicts the id k + 1 ahead: the first of them
    was drawn already, so head k makes guess k. All draw with the model's keys, as `DraftModel`
    does. Head k reads the id k ahead, which may be a guess. So each time the heads first read again
    the G + 1 newest ids, which include all that were read with guesses that did not stand.

    Args:
      guesses: number of heads, G.
    """

    name, is_reader, has_stream = "heads", True, True

    def __init__(self, guesses: int):
        self.guesses, self.reread = guesses, guesses + 1

    def weights(self) -> list[Array]:
        return []

    def empty(self, model: Decoder, rows: int, length: int, block: int | None) -> HeadsState:
        slots = length + self.guesses
        tokens = RowTokens(jnp.zeros((rows, slots), jnp.int32), jnp.zeros((rows,), jnp.int32))
        dtype, width = model.precision.activations, model.config.width
        stream = LayerCache.empty(rows, length, (1, width, 0), dtype, None, self.guesses)
        heads = model.empty_head_caches(rows, length, spare=self.guesses, block=block)
        return HeadsState(tokens, stream, heads)

    def admit(self, state: HeadsState, slot: Array, arrival: Any) -> HeadsState:
        length = arrival.ids.shape[0]
        ids = state.tokens.ids.at[slot, :length].set(arrival.ids)
        return state._replace(
            tokens=RowTokens(ids, state.tokens.length.at[slot].set(arrival.count))
        )

    def seen(
        self, state: HeadsState, slot: Array, start: Array, stream: Float[Array, "1 C D"]
    ) -> HeadsState:
        new = _entries(state.stream, stream)
        return state._replace(stream=state.stream.with_part(slot, start, new))

    def follow(
        self, sources: Sources, slots: Any, slot: Array, ids: Array, start: Array, count: Array
    ) -> HeadsState:
        state: HeadsState = slots.draft
        size = len(ids) - self.guesses
        stream = state.stream.part(slot, start, size).keys[:, 0]
        inputs = _head_inputs(start[None], size, count[None], start + size)
        heads = []
        for number, before in enumerate(state.heads):
            ahead = ids[None, number + 1 : number + 1 + size]
            stream, _, row = sources.model.read_head(
                number, stream, ahead, inputs, before.row(slot)
            )
            heads.append(before.with_row(slot, row))  # type: ignore[arg-type]
        return state._replace(heads=tuple(heads))

    def guess(
        self, sources: Sources, slots: Any, active: Array
    ) -> tuple[Int[Array, "B G"], HeadsState]:
        state: HeadsState = slots.draft
        model, window = sources.model, self.guesses + 1
        rows, read = jnp.arange(len(active)), slots.cache.length
        keys = jax.random.wrap_key_data(slots.keys)
        start = jnp.maximum(read - window, 0)
        newest = jnp.maximum(read - 1 - start, 0)  # place in the window that guesses come from
        reach = jnp.max(jnp.where(active, start + window, 0))
        count = jnp.where(active, jnp.minimum(read, window), 0)
        inputs = _head_inputs(start, window, count, reach)
        place = inputs.positions
        stream = jnp.take_along_axis(state.stream.keys[:, 0], place[..., None], axis=1)
        ids, history, heads, guesses = state.tokens.ids, slots.history, [], []
        for number, before in enumerate(state.heads):
            ahead = jnp.take_along_axis(ids, place + number + 1, axis=1)
            stream, values, written = model.read_head(number, stream, ahead, inputs, before)
            heads.append(written)
            chosen = jnp.take_along_axis(values, newest[:, None, None], axis=1)
            raw = model.logits(chosen)[:, 0]
            logits = penalized(raw, history, slots.settings, active) + slots.bias
            folded = jax.vmap(jax.random.fold_in)(keys, slots.drawn + number)
            token = draw_rows(logits, folded, slots.settings, active)
            history = history.extended(token, active)
            guesses.append(token)
            ids = ids.at[rows, read + number + 1].set(token, mode="drop")
        return jnp.stack(guesses, axis=1), state._replace(heads=tuple(heads))

    def extended(
        self, state: HeadsState, token: Array, stream: Float[Array, "B D"], where: Array
    ) -> HeadsState:
        # The stream is that at the newest id before this one.
        place = jnp.where(where, state.tokens.length - 1, state.stream.slots)
        written = state.stream.overwritten(_entries(state.stream, stream[:, None]), place[:, None])
        return state._replace(tokens=state.tokens.extended(token, where), stream=written)

    def caches(self, state: HeadsState) -> dict[str, tuple[Any, ...]]:
        return {"stream": (state.stream,), "heads": state.heads}

    def with_caches(self, state: HeadsState, layers: dict[str, tuple[Any, ...]]) -> HeadsState:
        return state._replace(stream=layers["stream"][0], heads=layers["heads"])


def _head_inputs(
    start: Int[Array, "B"], size: int, count: Int[Array, "B"], reach: Int[Array, ""]
) -> LayerInputs:
    """Return a head's inputs for `size` slots from `start` on; the first `count` have an id."""
    place = start[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    mask = cache_mask(KVCache({}, start), size, count=count)
    return LayerInputs(place, mask, start=start, reach=reach)


def _entries(cache: LayerCache, stream: Float[Array, "B T D"]) -> LayerCache:
    """Return the stream as the cache stores it."""
    keys = stream[:, :, None]
    return cache.entries(keys, keys[..., :0])
