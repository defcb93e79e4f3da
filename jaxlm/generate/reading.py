"""Passes of a decoder over tokens of slots: a chunk of one, or the next tokens of all."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxlm.models.backbone import Hidden
from jaxlm.models.decoder import Decoder
from jaxlm.nn.cache import KVCache


def read_chunk(
    model: Decoder, cache: KVCache, slot: Array, ids: Int[Array, "C"], start: Array, count: Array
) -> tuple[KVCache, Hidden]:
    """Read a chunk into a slot; return the cache and the hidden states [1, C, D].

    Args:
      model: the decoder.
      cache: the cache of all slots.
      slot: the slot.
      ids: the chunk, padded.
      start: tokens of the slot before the chunk.
      count: tokens of the chunk that are no padding.
    """
    layers = map_layers(lambda each: each.row(slot), cache.layers)
    index = start + jnp.arange(len(ids), dtype=jnp.int32)
    hidden = model.hidden(
        ids[None],
        positions=jnp.minimum(index, start + count - 1)[None],
        cache=KVCache(layers, start[None], reach=start + len(ids)),
        count=count[None],
    )
    assert hidden.cache is not None
    written = map_layers(
        lambda each, new: each.with_row(slot, new), cache.layers, hidden.cache.layers
    )
    return KVCache(written, cache.length.at[slot].set(start + count)), hidden


def read_next(
    model: Decoder, cache: KVCache, active: Bool[Array, "B"], tokens: Int[Array, "B T"]
) -> tuple[KVCache, Hidden]:
    """Read the next tokens of active rows; return the cache, its lengths unchanged.

    Also return the hidden states [B, T, D].
    """
    count = tokens.shape[1]
    positions = cache.length[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    if model.text_positions is not None:  # of guesses, and of rows that are not active
        positions = jnp.minimum(positions, model.text_positions - 1)
    reach = jnp.max(jnp.where(active, cache.length + count, 0))
    hidden = model.hidden(
        tokens,
        positions=positions,
        cache=cache._replace(reach=reach),
        count=count * active.astype(jnp.int32),
    )
    assert hidden.cache is not None
    return KVCache(hidden.cache.layers, cache.length), hidden


def map_layers(function: Callable[..., Any], *layers: dict[str, tuple[Any, ...]]) -> Any:
    """Apply a function to the caches of each layer."""
    return {name: tuple(map(function, *(each[name] for each in layers))) for name in layers[0]}
