"""Beam search."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxlm.generate import decode
from jaxlm.generate.decode import END, LENGTH, Generated, TextModel, is_in
from jaxlm.nn.cache import KVCache


class _Texts(NamedTuple):
    """Candidate texts of each row; a score of minus infinity marks an empty slot."""

    score: Array  # [B, K]
    ids: Array  # [B, K, M]
    log_probabilities: Array  # [B, K, M]
    length: Array  # [B, K]

    def best(self, count: int) -> tuple["_Texts", Array]:
        """Return the `count` best candidates, and their indices."""
        _, chosen = jax.lax.top_k(self.score, count)
        return self.at(chosen), chosen

    def at(self, chosen: Array) -> "_Texts":
        """Return the chosen candidates of each row."""
        return jax.tree.map(lambda x: jax.vmap(lambda row, indices: row[indices])(x, chosen), self)


class _State(NamedTuple):
    number: Array  # tokens drawn so far
    open: _Texts
    ended: _Texts
    is_closed: Array  # [B]
    cache: KVCache


def build(
    merge: Callable[[Any], TextModel],
    *,
    beams: int,
    length_penalty: float,
    max_tokens: int,
    ends: Sequence[int],
    pad: int,
    allowed: Int[Array, "V"] | None = None,
    both_ways: bool = False,
    is_int8: bool = False,
) -> Callable[[Any, Array, Array, Array], Generated]:
    """Return a function like that of `decode.build`, which ignores its keys: nothing is drawn.

    A text of n tokens, its end token included, scores the sum of its log-probabilities divided by
    n^length_penalty. After each token the `beams` best open texts are kept, and the best ended
    texts among those that were in the `beams` best when they ended. A row is finished once its best
    open text, at its present length, scores no more than the worst of `beams` ended texts. With a
    penalty above 0 it might still overtake; transformers stops there too (early_stopping=False).

    Args:
      merge: makes the model of its parameters.
      beams: number of texts kept.
      length_penalty: exponent of the length.
      max_tokens: maximum new ids of a text.
      ends: ids that end a text.
      pad: id after the end of a text.
      allowed: mask of ids that may be chosen; None allows all.
      both_ways: attend to prompts bidirectionally.
      is_int8: store the KV cache in int8.

    Source: Wu et al. 2016, arXiv:1609.08144, section 7, with the penalty of transformers.
    """

    def generate(params: Any, prompts: Array, lengths: Array, keys: Array) -> Generated:
        model = decode.relayout_for_decode(merge(params))
        rows = prompts.shape[0]
        hidden = decode.prefill(
            model, prompts, lengths, more=max_tokens, both_ways=both_ways, is_int8=is_int8
        )
        empty = _Texts(
            jnp.full((rows, beams), -jnp.inf),
            jnp.full((rows, beams, max_tokens), pad, jnp.int32),
            jnp.zeros((rows, beams, max_tokens)),
            jnp.zeros((rows, beams), jnp.int32),
        )
        start = _State(
            number=jnp.int32(0),
            open=empty._replace(score=empty.score.at[:, 0].set(0.0)),
            ended=empty,
            is_closed=jnp.zeros((rows,), bool),
            cache=jax.tree.map(lambda x: jnp.repeat(x, beams, axis=0), hidden.cache),
        )

        def is_open(state: _State) -> Array:
            return (state.number < max_tokens) & ~jnp.all(state.is_closed)

        def advance(state: _State) -> _State:
            token = state.open.ids[:, :, state.number - 1].reshape(-1, 1)
            values, cache = decode.decode_tokens(model, token, state.cache)
            return extend(model, values, state._replace(cache=cache))

        first = extend(model, jnp.repeat(hidden.values, beams, axis=0), start)
        best = jax.lax.while_loop(is_open, advance, first).ended.at(jnp.zeros((rows, 1), jnp.int32))
        ids, length = best.ids[:, 0], best.length[:, 0]
        last = jnp.take_along_axis(ids, length[:, None] - 1, axis=1)[:, 0]
        reason = jnp.where(is_in(last, ends), END, LENGTH)
        return Generated(ids, length, reason, best.log_probabilities[:, 0])

    def extend(model: TextModel, hidden: Array, state: _State) -> _State:
        """Extend each open text by every id; keep the best open and the best ended texts."""
        number = state.number
        logits = model.logits(hidden)[:, 0]
        vocab = logits.shape[-1]
        scores = jax.nn.log_softmax(logits).reshape(-1, beams, vocab)
        if allowed is not None:
            scores = jnp.where(allowed[None, None], scores, -jnp.inf)
        # 2 * beams candidates: enough open texts remain even if every beam's best id ends it.
        total = (state.open.score[..., None] + scores).reshape(-1, beams * vocab)
        score, chosen = jax.lax.top_k(total, 2 * beams)
        parent, token = chosen // vocab, (chosen % vocab).astype(jnp.int32)
        token_scores = jnp.take_along_axis(scores.reshape(-1, beams * vocab), chosen, axis=1)
        texts = state.open.at(parent)
        texts = texts._replace(
            score=score,
            ids=texts.ids.at[:, :, number].set(token),
            log_probabilities=texts.log_probabilities.at[:, :, number].set(token_scores),
            length=texts.length + 1,
        )
        is_ended = is_in(token, ends) | (number + 1 == max_tokens)
        size = (number + 1).astype(jnp.float32) ** length_penalty
        is_among = is_ended & (jnp.arange(2 * beams) < beams)[None]
        new = texts._replace(score=jnp.where(is_among, score / size, -jnp.inf))
        both = jax.tree.map(lambda a, b: jnp.concatenate((a, b), axis=1), state.ended, new)
        better, _ = both.best(beams)

        def frozen(old: Array, now: Array) -> Array:
            return jnp.where(state.is_closed.reshape(-1, *(1,) * (now.ndim - 1)), old, now)

        ended = jax.tree.map(frozen, state.ended, better)
        left = texts._replace(score=jnp.where(is_ended, -jnp.inf, score))
        survivors, survivor_index = left.best(beams)
        row = jnp.arange(len(parent))[:, None] * beams
        cache_rows = (row + jnp.take_along_axis(parent, survivor_index, axis=1)).reshape(-1)
        can_win = survivors.score[:, 0] / size > ended.score.min(axis=1)
        return _State(
            number=number + 1,
            open=survivors,
            ended=ended,
            is_closed=state.is_closed | ~can_win,
            cache=jax.tree.map(lambda x: x[cache_rows], state.cache),
        )

    return generate
