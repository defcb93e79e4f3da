"""Prefill and decode with a KV cache, in one compiled program or a few tokens at a time."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlm.core import backend
from jaxlm.data.batch import START
from jaxlm.generate.sampling import History, Penalties
from jaxlm.models.backbone import Hidden
from jaxlm.models.decoder import Decoder
from jaxlm.models.encoder_decoder import EncoderDecoder
from jaxlm.nn.cache import KVCache

TextModel = Decoder | EncoderDecoder
Draw = Callable[[Array, Array], Array]
NO_PENALTIES = Penalties()
LENGTH, END, STOP = 0, 1, 2  # reason why a row ended: max_tokens, an end token, a stop


class Generated(NamedTuple):
    """New ids of each row; those from `length` on are padding."""

    ids: Int[Array, "B M"]
    length: Int[Array, "B"]  # includes the end token, if any
    reason: Int[Array, "B"]
    log_probabilities: Float[Array, "B M"] | None


class DecodeState(NamedTuple):
    """State carried from token to token."""

    length: Array  # [B], tokens drawn so far
    ids: Array
    log_probabilities: Array | None
    token: Array  # [B], the last of each row
    reason: Array  # [B], -1 while a row is open
    stop_state: Array | None  # [B], states of the stop automaton
    history: History | None
    cache: KVCache


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Three functions that continue prompts; the same tokens come for any split into calls.

    `prepare(params)` returns the weights in the layout of a token loop, for the other functions.
    `start(ready, prompts [B, P], lengths [B], keys [B])` prefills and draws the first token. With a
    further `sources` [B], row b continues the prompt of that number, which is read once for all.
    `decode_until(ready, state, keys, until)` draws until each row ended or has `until` tokens;
    the state may be donated. With a further `ended` it returns once that many rows have ended.

    Called as (params, prompts, lengths, keys), it is one program up to `max_tokens`.
    """

    prepare: Callable[[Any], Any]
    start: Callable[..., DecodeState]
    decode_until: Callable[..., DecodeState]
    max_tokens: int

    def __call__(self, params: Any, prompts: Array, lengths: Array, keys: Array) -> Generated:
        ready = self.prepare(params)
        state = self.start(ready, prompts, lengths, keys)
        return collect(self.decode_until(ready, state, keys, jnp.int32(self.max_tokens)))

    def compiled(self) -> "Decoding":
        """Return the functions compiled; weights that need no other layout are not copied."""
        return dataclasses.replace(
            self,
            prepare=jax.jit(self.prepare) if needs_relayout() else self.prepare,
            start=jax.jit(self.start),
            decode_until=jax.jit(self.decode_until, donate_argnums=1),
        )


def is_in(token: Array, ids: Sequence[int]) -> Array:
    """Return a mask of the tokens that are among `ids`."""
    return jnp.isin(token, jnp.asarray(ids, jnp.int32))


def collect(state: DecodeState) -> Generated:
    """Return the result so far; a row that has not ended has the reason LENGTH."""
    reason = jnp.where(state.reason < 0, LENGTH, state.reason)
    return Generated(state.ids, state.length, reason, state.log_probabilities)


def build(
    merge: Callable[[Any], TextModel],
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
    temperature: float | None = None,
    is_int8: bool = False,
) -> Decoding:
    """Return the functions that continue prompts, to be jitted.

    Prompts are padded on the right to one length. The loop runs until each row has drawn one of
    `ends`, reached a stop, or has `max_tokens` ids; a row that has ended draws `pad`.

    Args:
      merge: makes the model of its parameters.
      draw: picks the next ids from (logits [B, V], keys [B]).
      max_tokens: maximum new ids of a row.
      ends: ids that end a row.
      pad: id after the end of a row.
      allowed: mask of ids that may be drawn; None allows all.
      both_ways: attend to prompts bidirectionally; new tokens are always causal.
      penalties: change of the logits before drawing.
      stops: table of `text_stream.automaton`.
      is_scored: return log-probabilities of the model over all ids, before penalties and cuts.
      temperature: that of `draw`, to return log-probabilities of the distribution drawn from: over
        the allowed ids, after penalties. None returns those of the model.
      is_int8: store the KV cache in int8. It has P + max_tokens slots a row; after an encoder,
        which reads the prompts, max_tokens.
    """
    prepare, model_of = weight_layout(merge)

    def start(
        ready: Any, prompts: Array, lengths: Array, keys: Array, sources: Array | None = None
    ) -> DecodeState:
        model, rows = model_of(ready), len(keys)
        hidden = prefill(
            model, prompts, lengths, more=max_tokens, both_ways=both_ways, is_int8=is_int8
        )
        assert hidden.cache is not None
        values, cache = hidden.values, hidden.cache
        if sources is not None:
            inputs = (values, cache, prompts, lengths)
            values, cache, prompts, lengths = jax.tree.map(lambda x: x[sources], inputs)
        empty, history = jnp.full((rows, max_tokens), pad, jnp.int32), None
        if penalties.is_active:  # prompts that an encoder read do not count
            counted = jnp.zeros_like(lengths) if isinstance(model, EncoderDecoder) else lengths
            history = History.of(prompts, counted, model.config.vocab)
        begun = DecodeState(
            length=jnp.zeros((rows,), jnp.int32),
            ids=empty,
            log_probabilities=jnp.zeros(empty.shape) if is_scored else None,
            token=empty[:, 0],
            reason=jnp.full((rows,), -1),
            stop_state=None if stops is None else jnp.zeros((rows,), stops.dtype),
            history=history,
            cache=cache,
        )
        return pick(model.logits(values)[:, 0], begun, keys, begun.reason < 0)

    def decode_until(
        ready: Any, state: DecodeState, keys: Array, until: Array, ended: Array | None = None
    ) -> DecodeState:
        model = model_of(ready)

        def is_open(state: DecodeState) -> Array:
            live = is_live(state)
            is_any = jnp.any(live & (state.length < until))
            return is_any if ended is None else is_any & (jnp.sum(~live) < ended)

        def advance(state: DecodeState) -> DecodeState:
            values, cache = decode_tokens(model, state.token[:, None], state.cache)
            live = is_live(state)
            # The next token of a row that has ended is written over this one.
            read = state.cache.length + live
            state = pick(model.logits(values)[:, 0], state, keys, live)
            return state._replace(cache=cache._replace(length=read))

        return jax.lax.while_loop(is_open, advance, state)

    def is_live(state: DecodeState) -> Array:
        """Return a mask of the rows that are not finished."""
        return (state.reason < 0) & (state.length < max_tokens)

    def pick(logits: Array, state: DecodeState, keys: Array, live: Array) -> DecodeState:
        """Return the state with one more id in each live row."""
        raw = logits
        if state.history is not None:
            logits = penalties(logits, state.history)
        if allowed is not None:
            logits = jnp.where(allowed[None], logits, -jnp.inf)
        token = draw(logits, jax.vmap(jax.random.fold_in)(keys, state.length))
        if temperature is not None:
            raw = logits / temperature
        row, place = jnp.arange(len(token)), jnp.where(live, state.length, max_tokens)
        scores = state.log_probabilities
        if scores is not None:
            score = jnp.take_along_axis(jax.nn.log_softmax(raw), token[:, None], axis=1)[:, 0]
            scores = scores.at[row, place].set(score, mode="drop")
        stop_state, is_end = state.stop_state, live & is_in(token, ends)
        reason = jnp.where(is_end, END, state.reason)
        if stops is not None and stop_state is not None:
            stop_state = jnp.where(live, stops[stop_state, token], stop_state)
            reason = jnp.where((reason < 0) & (stop_state == stops.shape[0] - 1), STOP, reason)
        return state._replace(
            length=state.length + live,
            ids=state.ids.at[row, place].set(token, mode="drop"),
            log_probabilities=scores,
            token=jnp.where(live, token, state.token),
            reason=reason,
            stop_state=stop_state,
            history=state.history and state.history.extended(token, live),
        )

    return Decoding(prepare, start, decode_until, max_tokens)


def weight_layout(
    merge: Callable[[Any], TextModel],
) -> tuple[Callable[[Any], Any], Callable[[Any], TextModel]]:
    """Return `prepare(params)`, the weights as a token loop reads them, and the model of those."""
    if not needs_relayout():
        return lambda params: params, merge

    def prepare(params: Any) -> Any:
        return nnx.split(relayout_for_decode(merge(params)))

    return prepare, lambda ready: nnx.merge(*ready)


def relayout_for_decode(model: TextModel) -> TextModel:
    """Return the model in the layout of a token loop.

    On CPU each layer's weights become separate arrays in the dtype of their matmul; slicing stacked
    weights would copy them for every token. 12 layers' MLPs took 47 ms a token instead of 75 in
    float32, 17 instead of 74 (a scan) in bfloat16 (2 cores, jax 0.10.2). `decode_layout` sets the
    order in memory. On other devices a second copy of the weights may not fit.
    """
    return model.relayout_for_decode() if needs_relayout() else model


def needs_relayout() -> bool:
    """Return True if the token loop reads other arrays than the parameters."""
    return backend.name() == "cpu"


def prefill(
    model: TextModel,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    *,
    more: int,
    both_ways: bool,
    is_int8: bool,
) -> Hidden:
    """Return the hidden state at each prompt's last token, [B, 1, D], and the filled KV cache.

    An encoder-decoder's encoder reads the prompts; the hidden state is that at the decoder's start.

    Args:
      prompts: prompts, padded on the right.
      more: slots of the cache after the prompts.
      both_ways: attend to prompts bidirectionally.
      is_int8: store the cache in int8.
    """
    rows, longest = prompts.shape
    if isinstance(model, EncoderDecoder):
        is_real = jnp.arange(longest)[None] < lengths[:, None]
        real = is_real.astype(jnp.int32)
        cache = model.init_cache(prompts, real, more, is_int8=is_int8)
        values, cache = decode_tokens(model, jnp.full((rows, 1), START, jnp.int32), cache)
        return Hidden(values, cache, {}, values)
    index = jnp.broadcast_to(jnp.arange(longest, dtype=jnp.int32)[None], prompts.shape)
    last = lengths[:, None] - 1
    hidden = model.hidden(
        prompts,
        positions=jnp.minimum(index, last),  # a position table may end where the padding begins
        visible_until=jnp.maximum(index, last) if both_ways else None,
        cache=model.empty_cache(rows, longest + more, is_int8=is_int8),
        count=lengths,
    )
    assert hidden.cache is not None
    values = jnp.take_along_axis(hidden.values, last[..., None], axis=1)
    return hidden._replace(values=values, cache=hidden.cache._replace(length=lengths))


def decode_tokens(
    model: TextModel, tokens: Int[Array, "B T"], cache: KVCache
) -> tuple[Array, KVCache]:
    """Run the model on more tokens of each row; return the hidden states [B, T, D] and cache."""
    count = tokens.shape[1]
    positions = cache.length[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    if model.text_positions is not None:  # of rows that have ended
        positions = jnp.minimum(positions, model.text_positions - 1)
    hidden = model.hidden(tokens, positions=positions, cache=cache)
    assert hidden.cache is not None
    return hidden.values, hidden.cache._replace(length=cache.length + count)
