"""Prefill and decode with a key-value cache, in one compiled program or a few tokens at a time."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlm.core import backend
from jaxlm.data.batch import START
from jaxlm.generate.lookup import Said
from jaxlm.generate.sampling import History, Penalties
from jaxlm.models.backbone import Hidden
from jaxlm.models.config import ModelConfig
from jaxlm.models.decoder import Decoder
from jaxlm.models.encoder_decoder import EncoderDecoder
from jaxlm.nn.cache import KVCache

Writer = Decoder | EncoderDecoder
Draw = Callable[[Array, Array], Array]
NO_PENALTIES = Penalties()
LENGTH, END, STOP = 0, 1, 2  # why a row ended: at its most tokens, at an end token, at a stop


class Generated(NamedTuple):
    """New ids of each row; those from `length` on are padding."""

    ids: Int[Array, "B M"]
    length: Int[Array, "B"]  # the end token included, where it came
    reason: Int[Array, "B"]
    log_probabilities: Float[Array, "B M"] | None


class State(NamedTuple):
    """What goes from token to token."""

    length: Array  # [B], tokens drawn so far
    ids: Array
    log_probabilities: Array | None
    token: Array  # [B], the last of each row
    reason: Array  # [B], -1 while a row is open
    at: Array | None  # [B], states of `stops`
    history: History | None
    said: Said | None
    cache: KVCache


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Three functions that go on from prompts, to be compiled; the same tokens come however many are asked for at a time.

    `ready(params)` are the weights as a loop over tokens reads them, which the others take.
    `begin(ready, prompts [B, P], lengths [B], keys [B])` reads the prompts and draws the first token of each.
    `go_on(ready, state, keys, until)` draws on until each row has `until` tokens, if not more, or has ended; the state may be
    donated.

    Called as (params, prompts, lengths, keys), all of it is one program, to the most tokens.
    """

    ready: Callable[[Any], Any]
    begin: Callable[[Any, Array, Array, Array], State]
    go_on: Callable[[Any, State, Array, Array], State]
    max_tokens: int

    def __call__(self, params: Any, prompts: Array, lengths: Array, keys: Array) -> Generated:
        ready = self.ready(params)
        state = self.begin(ready, prompts, lengths, keys)
        return drawn(self.go_on(ready, state, keys, jnp.int32(self.max_tokens)))

    def compiled(self) -> "Decoding":
        """Each function as a program of its own; where the weights are read as they are, no copy of them is made."""
        return dataclasses.replace(
            self,
            ready=jax.jit(self.ready) if is_prepared() else self.ready,
            begin=jax.jit(self.begin),
            go_on=jax.jit(self.go_on, donate_argnums=1),
        )


def can_look_up(config: ModelConfig) -> bool:
    """Whether what comes of a token is the same with guesses behind it: not where a position far on changes its rotation."""
    return not any(
        layer.attention.rotary and layer.attention.rotary.beyond for layer in config.layers
    )


def is_any(token: Array, ids: Sequence[int]) -> Array:
    """Where a token is one of some ids."""
    return jnp.isin(token, jnp.asarray(ids, jnp.int32))


def drawn(state: State) -> Generated:
    """What there is so far; the reason of a row that has not ended is its length."""
    reason = jnp.where(state.reason < 0, LENGTH, state.reason)
    return Generated(state.ids, state.length, reason, state.log_probabilities)


def build(
    merge: Callable[[Any], Writer],
    draw: Draw,
    *,
    max_tokens: int,
    ends: Sequence[int],
    pad: int,
    allowed: Int[Array, "V"] | None = None,
    both_ways: bool = False,
    penalties: Penalties = NO_PENALTIES,
    stops: Int[Array, "S V"] | None = None,
    is_scored: bool = False,
    is_int8: bool = False,
    lookup: int = 0,
) -> Decoding:
    """What goes on from prompts, to be jitted.

    Prompts are padded on the right to one length. All rows run until each has drawn one of `ends`, has come to a stop, or has
    `max_tokens` ids; a row that has ended draws `pad`. `draw(logits [B, V], keys [B])` picks the next ids; where `allowed`
    is False an id is never drawn. `both_ways` is how prompts are read; what is drawn is read from left to right.

    Args:
      penalties: what becomes of logits before ids are drawn from them.
      stops: what `stops.automaton` makes.
      is_scored: whether log-probabilities come back: those of the model itself, over all ids, before penalties and cuts.
      is_int8: whether the cache, which holds P + max_tokens slots a row, is rounded; beside an encoder, which reads the
        prompts, max_tokens.
      lookup: tokens that are guessed from the row at a time and read with the last drawn one. Each token is drawn as
        without, from the model's own logits and with its own key; as far as guesses turn out right, several come of one pass.
        0 where a token's numbers depend on those after it, see `can_look_up`.
    """
    is_other = is_prepared()

    def ready(params: Any) -> Any:
        return nnx.split(prepared(merge(params))) if is_other else params

    def model_of(ready: Any) -> Writer:
        return nnx.merge(*ready) if is_other else merge(ready)

    def begin(ready: Any, prompts: Array, lengths: Array, keys: Array) -> State:
        model = model_of(ready)
        rows = prompts.shape[0]
        hidden = prefill(
            model,
            prompts,
            lengths,
            more=max_tokens,
            both_ways=both_ways,
            is_int8=is_int8,
            spare=lookup,
        )
        assert hidden.cache is not None
        empty = jnp.full((rows, max_tokens), pad, jnp.int32)
        begun = State(
            length=jnp.zeros((rows,), jnp.int32),
            ids=empty,
            log_probabilities=jnp.zeros(empty.shape) if is_scored else None,
            token=empty[:, 0],
            reason=jnp.full((rows,), -1),
            at=None if stops is None else jnp.zeros((rows,), stops.dtype),
            history=_history(model, prompts, lengths) if penalties.is_any else None,
            said=Said.of(prompts, lengths, max_tokens) if lookup else None,
            cache=hidden.cache,
        )
        return pick(model.logits(hidden.values)[:, 0], begun, keys, begun.reason < 0)

    def go_on(ready: Any, state: State, keys: Array, until: Array) -> State:
        model = model_of(ready)

        def is_open(state: State) -> Array:
            return jnp.any(is_live(state) & (state.length < until))

        def advance(state: State) -> State:
            tokens, guesses = state.token[:, None], None
            if state.said is not None:
                guesses = state.said.guess(lookup)
                tokens = jnp.concatenate((tokens, guesses), axis=1)
            values, cache = following(model, tokens, state.cache)
            logits, before, live = model.logits(values), state.length, is_live(state)
            for place in range(tokens.shape[1]):
                if guesses is not None and place:
                    live = live & is_live(state) & (state.token == guesses[:, place - 1])
                state = pick(logits[:, place], state, keys, live)
            # What was read of wrong guesses is written over.
            read = state.cache.length + state.length - before
            return state._replace(cache=cache._replace(length=read))

        return jax.lax.while_loop(is_open, advance, state)

    def is_live(state: State) -> Array:
        """Rows that go on."""
        return (state.reason < 0) & (state.length < max_tokens)

    def pick(logits: Array, state: State, keys: Array, live: Array) -> State:
        """The state with one id more in each row that is live."""
        raw = logits
        if state.history is not None:
            logits = penalties(logits, state.history)
        if allowed is not None:
            logits = jnp.where(allowed[None], logits, -jnp.inf)
        token = draw(logits, jax.vmap(jax.random.fold_in)(keys, state.length))
        row, place = jnp.arange(len(token)), jnp.where(live, state.length, max_tokens)
        found = state.log_probabilities
        if found is not None:
            score = jnp.take_along_axis(jax.nn.log_softmax(raw), token[:, None], axis=1)[:, 0]
            found = found.at[row, place].set(score, mode="drop")
        at, reason = state.at, jnp.where(live & is_any(token, ends), END, state.reason)
        if stops is not None and at is not None:
            at = jnp.where(live, stops[at, token], at)
            reason = jnp.where((reason < 0) & (at == stops.shape[0] - 1), STOP, reason)
        return state._replace(
            length=state.length + live,
            ids=state.ids.at[row, place].set(token, mode="drop"),
            log_probabilities=found,
            token=jnp.where(live, token, state.token),
            reason=reason,
            at=at,
            history=state.history and state.history.extended(token, live),
            said=state.said and state.said.extended(token, live),
        )

    return Decoding(ready, begin, go_on, max_tokens)


def _history(model: Writer, prompts: Array, lengths: Array) -> History:
    """What a row has said before anything is drawn: its prompt, but nothing where an encoder read that."""
    known = jnp.zeros_like(lengths) if isinstance(model, EncoderDecoder) else lengths
    return History.of(prompts, known, model.config.vocab)


def prepared(model: Writer) -> Writer:
    """The model as a loop over tokens reads it.

    On CPU each layer's weights lie by themselves, in the dtype in which they are multiplied: of stacked ones a copy would be
    cut out for every token. 12 layers' MLPs took 47 ms a token instead of 75 in float32, 17 instead of 74 (a scan) in
    bfloat16 (2 cores, jax 0.10.2). How they lie is for `layouts.for_few_rows`. Elsewhere a second copy of the weights may not fit.
    """
    return model.unstacked() if is_prepared() else model


def is_prepared() -> bool:
    """Whether a loop over tokens reads other arrays than the parameters."""
    return backend.name() == "cpu"


def prefill(
    model: Writer,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    *,
    more: int,
    both_ways: bool,
    is_int8: bool,
    spare: int = 0,
) -> Hidden:
    """The stream at the last token of each prompt, [B, 1, D], and a cache with the prompts in it and room for `more`.

    Up to 1 + `spare` tokens may then be read at a time, of which the last are read again. Of an encoder-decoder the encoder reads the prompts, and the stream is that at what the decoder begins with.
    """
    rows, longest = prompts.shape
    if isinstance(model, EncoderDecoder):
        is_real = jnp.arange(longest)[None] < lengths[:, None]
        begun = model.begun(prompts, is_real.astype(jnp.int32), more, is_int8=is_int8, spare=spare)
        values, cache = following(model, jnp.full((rows, 1), START, jnp.int32), begun)
        return Hidden(values, cache, {}, values)
    index = jnp.broadcast_to(jnp.arange(longest, dtype=jnp.int32)[None], prompts.shape)
    last = lengths[:, None] - 1
    hidden = model(
        prompts,
        positions=jnp.minimum(index, last),  # a table of positions may end where the padding begins
        reach=jnp.maximum(index, last) if both_ways else None,
        cache=model.empty_cache(rows, longest + more, is_int8=is_int8, spare=spare),
        count=lengths,
    )
    assert hidden.cache is not None
    values = jnp.take_along_axis(hidden.values, last[..., None], axis=1)
    return hidden._replace(values=values, cache=hidden.cache._replace(length=lengths))


def following(model: Writer, tokens: Int[Array, "B T"], cache: KVCache) -> tuple[Array, KVCache]:
    """The stream at some tokens more of each row, [B, T, D], and the cache with them."""
    count = tokens.shape[1]
    positions = cache.length[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    if model.config.positions is not None:  # of guesses alone
        positions = jnp.minimum(positions, model.config.positions - 1)
    hidden = model(tokens, positions=positions, cache=cache)
    assert hidden.cache is not None
    return hidden.values, hidden.cache._replace(length=cache.length + count)
