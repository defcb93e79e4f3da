"""The compiled programs of the engine: a KV cache with a static number of rows, its slots.

A prompt is read in chunks of a static number of tokens, all but its last token. The last token is
the first input of the decode program, so that every token is drawn from the logits of one program.
Chunks of a prompt begin at multiples of the chunk's size, and read the slots up to their own end.
The numbers of a row therefore depend on its own ids alone: not on the slot, the other rows, or the
time of arrival.

On a CPU there is a decode program whose products compute the first slots alone, for few requests.
`Engine.warm_up` checks that it draws the bits of the program of all slots.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.core import backend, random
from jaxlm.generate import decode
from jaxlm.generate.consume import consume
from jaxlm.generate.draft import Draft, Sources
from jaxlm.generate.reading import map_layers, read_chunk, read_next
from jaxlm.generate.rows import RowSettings, draw_rows, limited, penalized
from jaxlm.generate.sampling import History
from jaxlm.models.decoder import Decoder
from jaxlm.nn.cache import KVCache
from jaxlm.ops.row_product import DecodeRows, decode_rows, is_one_cpu

BLOCK = 128  # least slots of a block of the KV cache
FEW = 2  # slots that products of `draw_few` compute
PASSES = 32  # most decode passes of a call
TOP = 20  # largest number of alternatives whose log-probabilities are returned
NO_SCORES = -1  # in the place of a number of alternatives: not even the score of the token


Weights = tuple[list[Array], list[Array]]  # prepared: of the model, of the draft


class Slots(NamedTuple):
    """State of all slots on the device."""

    cache: KVCache
    token: Int[Array, "B"]  # the next input of each row
    drawn: Int[Array, "B"]  # tokens drawn so far
    keys: Array  # [B, 2], the words of each key: arrays of keys are slow to pass to a program
    history: History
    bias: Float[Array, "B V"]  # minus infinity for ids that may not be drawn
    ends: Bool[Array, "B V"]  # ids that end a row
    settings: RowSettings
    draft: Any = None  # the state of the draft, if there is one


class Arrival(NamedTuple):
    """A request as it enters a slot."""

    token: Any  # the last id of the prompt
    seed: Any
    ids: Any  # [T], the prompt, padded with the vocabulary's size
    count: Any  # ids of the prompt
    bias: Any  # [V]
    ends: Any  # [V]
    settings: RowSettings


class Scores(NamedTuple):
    """Log-probabilities of ids under the model itself, before temperature, penalties and cuts."""

    chosen: Float[Array, "B"]
    top_ids: Int[Array, "B N"]
    top: Float[Array, "B N"]


class DecodedTokens(NamedTuple):
    """Results of decode passes; a row that has ended draws no more.

    Each pass has 1 + G places: the next token of each row, and G guesses.
    """

    passes: Int[Array, ""]
    is_drawn: Bool[Array, "P*G+P B"]
    token: Int[Array, "P*G+P B"]
    is_finite: Bool[Array, "P*G+P B"]
    scores: Scores  # [P*G+P, B, ...]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled functions; `state` is donated.

    `prepare(params)` returns the weights as the others read them, and `consume(params)` does so in
    parts and deletes the parameters. `empty()` returns a state.
    `admit(state, slot, arrival)` puts a request into a slot.
    `read(ready, state, slot, ids [C], start, count)` reads a chunk of a prompt.
    `read_seen(...)` does the same, and the draft sees the stream; None if it needs no stream.
    `score(...)` does the same and returns `Scores` of the ids `after` the chunk's ids.
    `follow(ready, state, slot, ids [C + G], start, count)` lets the draft read a chunk of ids that
    the model has read; the G ids after the chunk are known to the extent that they are drawn.
    `draw(ready, state, active, top, allowed, left, passes, is_awaited)` draws up to `left` tokens
    for each active row in at most `passes` passes; if a slot `is_awaited`, until one of them has
    ended. `top` are the alternatives of each score, or NO_SCORES; `allowed` has a bit for each id
    of a row that may be drawn, see `rows.limited`.
    `draw_guessed(...)` does the same with the guesses of the draft; None without a draft. Rows of
    `is_guessed`, its last argument, may take guesses.
    `draw_few(...)` and `draw_few_guessed(...)` do the same if all active rows are in the first FEW
    slots.
    `save(state, slot, start)` returns the keys and values of a chunk that a slot has read, and
    `load(state, slot, start, block)` puts them into a slot in place of reading.
    `wipe(state, slot)` clears a slot that has numbers that are not finite.
    """

    prepare: Callable[[Any], Any]
    consume: Callable[[Any], Any]
    empty: Callable[[], Slots]
    admit: Callable[..., Slots]
    read: Callable[..., Slots]
    read_seen: Callable[..., Slots] | None
    follow: Callable[..., Slots] | None
    score: Callable[..., tuple[Slots, Scores]]
    draw: Callable[..., tuple[Slots, DecodedTokens]]
    draw_guessed: Callable[..., tuple[Slots, DecodedTokens]] | None
    draw_few: Callable[..., tuple[Slots, DecodedTokens]]
    draw_few_guessed: Callable[..., tuple[Slots, DecodedTokens]] | None
    save: Callable[..., Any]
    load: Callable[..., Slots]
    wipe: Callable[..., Slots]


@dataclasses.dataclass(frozen=True, eq=False)
class SlotFunctions:
    """The functions behind `Programs`, before they are compiled; `Programs` describes them.

    Args:
      model: makes the model of the leaves of prepared weights.
      rows: number of slots.
      length: tokens of a slot, a multiple of `chunk`.
      chunk: tokens of a prompt that are read at once.
      is_int8: store the KV cache in int8.
      draft: guesses tokens.
    """

    model: Callable[[list[Array]], Decoder]
    rows: int
    length: int
    chunk: int
    is_int8: bool
    draft: Draft | None

    def empty(self, model: Decoder) -> Slots:
        """Return the state of free slots."""
        vocab, rows, length = model.config.vocab, self.rows, self.length
        spare = self.draft.guesses if self.draft is not None else 0
        # A condition on a device costs more than it saves. A chunk is in one block.
        block = self.chunk * -(-BLOCK // self.chunk) if backend.name() == "cpu" else None
        none = jnp.zeros((rows,), jnp.int32)
        return Slots(
            cache=model.empty_cache(rows, length, is_int8=self.is_int8, spare=spare, block=block),
            token=none,
            drawn=none,
            keys=jnp.zeros((rows, 2), jnp.uint32),
            history=History(jnp.zeros((rows, vocab), bool), jnp.zeros((rows, vocab), jnp.int32)),
            bias=jnp.zeros((rows, vocab)),
            ends=jnp.zeros((rows, vocab), bool),
            settings=RowSettings.empty(rows),
            draft=self.draft and self.draft.empty(model, rows, length, block),
        )

    def admit(self, state: Slots, slot: Array, arrival: Arrival) -> Slots:
        """Put a request into a slot."""
        vocab = state.bias.shape[1]
        seen = jnp.zeros((vocab,), bool).at[arrival.ids].set(True, mode="drop")
        history = History(
            state.history.seen.at[slot].set(seen), state.history.drawn.at[slot].set(0)
        )
        settings = [
            row.at[slot].set(value)
            for row, value in zip(state.settings, arrival.settings, strict=True)
        ]
        return Slots(
            cache=state.cache._replace(length=state.cache.length.at[slot].set(0)),
            token=state.token.at[slot].set(arrival.token),
            drawn=state.drawn.at[slot].set(0),
            keys=state.keys.at[slot].set(jax.random.key_data(random.key(arrival.seed, "sample"))),
            history=history,
            bias=state.bias.at[slot].set(arrival.bias),
            ends=state.ends.at[slot].set(arrival.ends),
            settings=RowSettings(*settings),
            draft=self.draft and self.draft.admit(state.draft, slot, arrival),
        )

    def read(
        self, ready: Weights, state: Slots, slot: Array, ids: Array, start: Array, count: Array
    ) -> Slots:
        """Read a chunk of a prompt.

        Args: those of `Programs.read`.
        """
        cache, _ = read_chunk(self.model(ready[0]), state.cache, slot, ids, start, count)
        return state._replace(cache=cache)

    def read_seen(self, *inputs: Any) -> Slots:
        """Read a chunk, for the draft too."""
        return self._seen(*inputs)[0]

    def score(
        self,
        ready: Weights,
        state: Slots,
        slot: Array,
        ids: Array,
        start: Array,
        count: Array,
        after: Array,
    ) -> tuple[Slots, Scores]:
        """Read a chunk, and return the scores of the ids `after` its ids.

        Args: those of `Programs.score`.
        """
        state, values = self._seen(ready, state, slot, ids, start, count)
        return state, scores_of(self.model(ready[0]).logits(values)[0], after)

    def _seen(
        self, ready: Weights, state: Slots, slot: Array, ids: Array, start: Array, count: Array
    ) -> tuple[Slots, Array]:
        """Read a chunk into a slot, for the draft too; return the hidden states [1, C, D]."""
        cache, hidden = read_chunk(self.model(ready[0]), state.cache, slot, ids, start, count)
        drafted = self.draft and self.draft.seen(state.draft, slot, start, hidden.stream)
        return state._replace(cache=cache, draft=drafted), hidden.values

    def follow(
        self, ready: Weights, state: Slots, slot: Array, ids: Array, start: Array, count: Array
    ) -> Slots:
        """Let the draft read a chunk that the model has read.

        Args: those of `Programs.follow`.
        """
        assert self.draft is not None
        read = self.draft.follow(self._sources(ready), state, slot, ids, start, count)
        return state._replace(draft=read)

    def _sources(self, ready: Weights) -> Sources:
        return Sources(self.model(ready[0]), ready[1])

    def draw(
        self,
        guesses: int,
        ready: Weights,
        state: Slots,
        active: Array,
        top: Array,
        allowed: Array,
        left: Array,
        passes: Array,
        is_awaited: Array,
        is_guessed: Any = False,
    ) -> tuple[Slots, DecodedTokens]:
        """Draw tokens for all active rows.

        Args: each pass has `guesses` guesses; the others are those of `Programs.draw_guessed`.
        """
        model, vocab, places = self.model(ready[0]), state.bias.shape[1], 1 + guesses
        none = jnp.zeros((PASSES * places, self.rows))
        likeliest = jnp.zeros((PASSES * places, self.rows, min(TOP, vocab)))
        scores = Scores(none, likeliest.astype(jnp.int32), likeliest)
        ids, off = none.astype(jnp.int32), none.astype(bool)
        before = state.drawn

        def is_on(carry: tuple[Slots, Array, DecodedTokens]) -> Array:
            _, on, drawn = carry
            is_freed = is_awaited & jnp.any(active & ~on)
            return (drawn.passes < passes) & jnp.any(on) & ~is_freed

        def step(carry: tuple[Slots, Array, DecodedTokens]) -> tuple[Slots, Array, DecodedTokens]:
            state, on, drawn = carry
            tokens = state.token[:, None]
            if self.draft is not None and guesses:
                guessed, drafted = self.draft.guess(self._sources(ready), state, on)
                tokens = jnp.concatenate((tokens, jnp.clip(guessed, 0, vocab - 1)), axis=1)
                state = state._replace(draft=drafted)
            cache, hidden = read_next(model, state.cache, on, tokens)
            raw = model.logits(hidden.values)
            first = drawn.passes * places

            def pick(place: Array | int, carry: Any) -> Any:
                state, live, on, arrays = carry
                if guesses:  # that at `place` was read, and must equal what the model drew
                    stands = is_guessed & (state.token == tokens[:, place])
                    live = live & on & ((place == 0) | stands)
                state, token, is_finite, scores = self._draw_one(
                    raw[:, place], hidden.stream[:, place], state, live, top, allowed
                )
                parts, number = (live, token, is_finite, scores), first + place
                arrays = jax.tree.map(lambda x, new: x.at[number].set(new), arrays, parts)
                is_end = jnp.take_along_axis(state.ends, token[:, None], axis=1)[:, 0]
                is_last = is_end | ~is_finite | (state.drawn - before >= left)
                return state, live, on & ~(live & is_last), arrays

            picked = (state._replace(cache=cache), on, on, drawn[1:])
            picked = jax.lax.fori_loop(0, places, pick, picked) if guesses else pick(0, picked)
            state, _, on, arrays = picked
            return state, on, DecodedTokens(drawn.passes + 1, *arrays)

        begun = DecodedTokens(jnp.int32(0), off, ids, off, scores)
        state, _, drawn = jax.lax.while_loop(is_on, step, (state, active, begun))
        return state, drawn

    def _draw_one(
        self, raw: Array, stream: Array, state: Slots, active: Array, top: Array, allowed: Array
    ) -> tuple[Slots, Array, Array, Scores]:
        """Draw a token for each active row; return the state, tokens, finiteness and scores.

        Args:
          raw: logits of the model [B, V].
          stream: its stream after the last layer [B, D].
          state: the slots.
          active: rows that draw.
          top: alternatives of the scores of each row, or NO_SCORES.
          allowed: ids that each row may draw, see `rows.limited`.
        """
        logits = penalized(raw, state.history, state.settings, active) + state.bias
        logits = limited(logits, allowed)
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(state.keys), state.drawn)
        token = draw_rows(logits, keys, state.settings, active)
        most = jnp.clip(jnp.max(top), NO_SCORES, 1)
        kinds = (no_scores, functools.partial(scores_of, count=0), scores_of)
        scores = jax.lax.switch(most - NO_SCORES, kinds, raw, token)
        new = state._replace(
            cache=state.cache._replace(length=state.cache.length + active),
            token=jnp.where(active, token, state.token),
            drawn=state.drawn + active,
            history=state.history.extended(token, active),
            draft=self.draft and self.draft.extended(state.draft, token, stream, active),
        )
        return new, token, jnp.isfinite(jnp.max(raw, axis=-1)), scores

    def save(self, state: Slots, slot: Array, start: Array) -> Any:
        """Return the keys and values of a chunk."""
        return map_layers(lambda cache: cache.part(slot, start, self.chunk), self._caches(state))

    def load(self, state: Slots, slot: Array, start: Array, parts: Any) -> Slots:
        """Put the keys and values of a chunk into a slot."""
        layers = map_layers(
            lambda cache, part: cache.with_part(slot, start, part), self._caches(state), parts
        )
        state = self._with_caches(state, layers)
        length = state.cache.length.at[slot].set(start + self.chunk)
        return state._replace(cache=state.cache._replace(length=length))

    def wipe(self, state: Slots, slot: Array) -> Slots:
        """Clear a slot."""
        cleared = map_layers(lambda cache: cache.cleared(slot), self._caches(state))
        return self._with_caches(state, cleared)

    def _caches(self, state: Slots) -> dict[str, tuple[Any, ...]]:
        """Return the caches whose parts are prefixes: those of the model and of the draft."""
        drafted = {} if self.draft is None else self.draft.caches(state.draft)
        return {**state.cache.layers, **{f"draft {name}": each for name, each in drafted.items()}}

    def _with_caches(self, state: Slots, layers: dict[str, tuple[Any, ...]]) -> Slots:
        mine = {name: layers[name] for name in state.cache.layers}
        state = state._replace(cache=state.cache._replace(layers=mine))
        if self.draft is None:
            return state
        drafted = {name: layers[f"draft {name}"] for name in self.draft.caches(state.draft)}
        return state._replace(draft=self.draft.with_caches(state.draft, drafted))


def build(
    merge: Callable[[Any], Any],
    params: Any,
    *,
    rows: int,
    length: int,
    chunk: int,
    is_int8: bool = False,
    draft: Draft | None = None,
) -> Programs:
    """Return the programs for `rows` slots of `length` tokens, jitted.

    Args:
      merge: makes the model, a `Decoder`, of its parameters.
      params: the parameters, or their shapes.
      rows: number of slots.
      length: tokens of a slot, a multiple of `chunk`.
      chunk: tokens of a prompt that are read at once.
      is_int8: store the KV cache in int8.
      draft: guesses tokens.
    """
    relayout, merged = decode.weight_layout(merge)
    layout = jax.tree.structure(jax.eval_shape(relayout, params))
    # The programs hold no weights: engines of other weights use them too.
    shapes = jax.eval_shape(lambda params: params, params)

    def model_of(leaves: list[Array]) -> Decoder:
        model = merged(jax.tree.unflatten(layout, leaves))
        assert isinstance(model, Decoder)
        return model

    def prepare(params: Any) -> list[Array]:
        # A list of arrays: the modules of Flax cost a millisecond to flatten for each program.
        return jax.tree.leaves(relayout(params))

    def with_draft(weights: list[Array]) -> Weights:
        return weights, draft.weights() if draft is not None else []

    prepared = jax.jit(prepare) if decode.needs_relayout() else prepare
    consumed = functools.partial(consume, prepare) if decode.needs_relayout() else prepare
    slots = SlotFunctions(model_of, rows, length, chunk, is_int8, draft)

    def drawing(used: int, guesses: int) -> Callable[..., tuple[Slots, DecodedTokens]]:
        def draw(*inputs: Any) -> tuple[Slots, DecodedTokens]:
            with decode_rows(DecodeRows(used, rows) if is_one_cpu() else None):
                return slots.draw(guesses, *inputs)

        return jax.jit(draw, donate_argnums=1)

    few = min(FEW, rows)
    return Programs(
        prepare=lambda params: with_draft(prepared(params)),
        consume=lambda params: with_draft(consumed(params)),
        empty=jax.jit(lambda: slots.empty(merge(jax.tree.map(jnp.zeros_like, shapes)))),
        admit=jax.jit(slots.admit, donate_argnums=0),
        read=jax.jit(slots.read, donate_argnums=1),
        read_seen=jax.jit(slots.read_seen, donate_argnums=1)
        if draft and draft.has_stream
        else None,
        follow=jax.jit(slots.follow, donate_argnums=1) if draft and draft.is_reader else None,
        score=jax.jit(slots.score, donate_argnums=1),
        draw=drawing(rows, 0),
        draw_guessed=drawing(rows, draft.guesses) if draft is not None else None,
        draw_few=drawing(few, 0),
        draw_few_guessed=drawing(few, draft.guesses) if draft is not None else None,
        save=jax.jit(slots.save),
        load=jax.jit(slots.load, donate_argnums=0),
        wipe=jax.jit(slots.wipe, donate_argnums=0),
    )


def compile_at_once(calls: Iterable[tuple[Any, tuple[Any, ...]]]) -> None:
    """Compile programs in threads while the next is traced; calls of them find them compiled.

    Args:
      calls: jitted functions, each with the arguments of a call.
    """
    mesh = jax.sharding.get_mesh()

    def compiled(lowered: Any) -> None:
        with jax.set_mesh(mesh):  # it is the thread's, and part of the key of what is compiled
            lowered.compile()

    with ThreadPoolExecutor() as pool:
        tasks = [pool.submit(compiled, program.lower(*inputs)) for program, inputs in calls]
    for task in tasks:
        task.result()


def scores_of(logits: Float[Array, "B V"], ids: Int[Array, "B"], *, count: int = TOP) -> Scores:
    """Return the log-probability of each id, and the `count` likeliest ids with theirs, or zeros.

    The likeliest ids take longer than all the rest.
    """
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = (jnp.take_along_axis(logits, ids[:, None], axis=-1) - total)[:, 0]
    if not count:
        return no_scores(logits, ids)._replace(chosen=chosen)
    top, top_ids = jax.lax.top_k(logits, min(count, logits.shape[-1]))
    return Scores(chosen, top_ids, top - total)


def no_scores(logits: Float[Array, "B V"], ids: Int[Array, "B"]) -> Scores:
    """Return zeros in the place of scores."""
    zeros = jnp.zeros((len(ids), min(TOP, logits.shape[-1])))
    return Scores(zeros[:, 0], zeros.astype(jnp.int32), zeros)
