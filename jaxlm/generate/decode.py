"""Prefill and decode with a key-value cache, in one compiled program."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxlm.models.decoder import Decoder
from jaxlm.nn.cache import KVCache

Draw = Callable[[Array, Array], Array]


class Generated(NamedTuple):
    """New ids of each row; those from `length` on are padding."""

    ids: Int[Array, "B M"]
    length: Int[Array, "B"]  # the end token included, where it came


def build(
    merge: Callable[[Any], Decoder],
    draw: Draw,
    *,
    max_tokens: int,
    end: int,
    pad: int,
    allowed: Int[Array, "V"] | None = None,
    both_ways: bool = False,
) -> Callable[[Any, Array, Array, Array], Generated]:
    """The function (params, prompts [B, P], lengths [B], key) -> Generated, to be jitted.

    Prompts are padded on the right to one length. All rows run until each has drawn `end` or `max_tokens` ids.
    `draw(logits [B, V], key)` picks the next ids; where `allowed` is False an id is never drawn. The cache holds
    P + max_tokens slots a row. `both_ways` is how prompts are read; what is drawn is read from left to right.
    """

    def generate(params: Any, prompts: Array, lengths: Array, key: Array) -> Generated:
        model = merge(params)
        rows, longest = prompts.shape
        cache = model.empty_cache(rows, longest + max_tokens)
        positions = jnp.broadcast_to(jnp.arange(longest, dtype=jnp.int32)[None], prompts.shape)
        reach = None
        if both_ways:
            reach = jnp.maximum(positions, lengths[:, None] - 1)
        hidden = model(prompts, positions=positions, reach=reach, cache=cache)
        last = jnp.take_along_axis(hidden.values, (lengths - 1)[:, None, None], axis=1)
        first = pick(model, last, jax.random.fold_in(key, 0))
        ids = jnp.full((rows, max_tokens), pad, jnp.int32).at[:, 0].set(first)
        assert hidden.cache is not None
        begun = (jnp.int32(1), ids, hidden.cache._replace(length=lengths), first, first == end)

        def is_open(carry: tuple[Array, Array, KVCache, Array, Array]) -> Array:
            number, *_, ended = carry
            return (number < max_tokens) & ~jnp.all(ended)

        def advance(
            carry: tuple[Array, Array, KVCache, Array, Array],
        ) -> tuple[Array, Array, KVCache, Array, Array]:
            number, ids, cache, token, ended = carry
            hidden = model(token[:, None], positions=cache.length[:, None], cache=cache)
            drawn = pick(model, hidden.values, jax.random.fold_in(key, number))
            drawn = jnp.where(ended, pad, drawn)
            assert hidden.cache is not None
            cache = hidden.cache._replace(length=cache.length + 1)
            return number + 1, ids.at[:, number].set(drawn), cache, drawn, ended | (drawn == end)

        number, ids, *_ = jax.lax.while_loop(is_open, advance, begun)
        written = jnp.arange(max_tokens)[None] < number
        stops = (ids == end) & written
        length = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, number)
        return Generated(ids, length.astype(jnp.int32))

    def pick(model: Decoder, hidden: Array, key: Array) -> Array:
        logits = model.logits(hidden)[:, 0]
        if allowed is not None:
            logits = jnp.where(allowed[None], logits, -jnp.inf)
        return draw(logits, key)

    return generate
