"""Keys and values of tokens already read."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxlm.ops import quantize
from jaxlm.parallel.rules import constrain

NOWHERE = jnp.iinfo(jnp.int32).max  # the index of a slot that holds nothing: no query sees as far


class VisibleKV(NamedTuple):
    """What new queries attend to."""

    keys: Float[Array, "B S K H"]
    values: Float[Array, "B S K U"]
    places: Int[Array, "B S"] | Int[Array, "1 S"]  # of each key in its row


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys", "values", "key_scale", "value_scale"),
    meta_fields=("is_ring", "spare"),
)
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values; in latent attention its one rotated key for all heads, and the latent as the value.

    Token i of a row lies in slot i, or in a ring in slot i % S, over token i - S: a layer whose queries see a window of S
    keys needs no more. With scales, the numbers are int8: each is within half a scale of what was written, and the scale
    is the largest magnitude of a head's key or value over 127, so within 0.4% of that.

    Heads come before slots, as the products of attention read them: else all of it would be turned for every token.
    """

    keys: Array  # [B, K, S, H]
    values: Array  # [B, K, S, U]
    key_scale: Float[Array, "B K S 1"] | None = None
    value_scale: Float[Array, "B K S 1"] | None = None
    is_ring: bool = False
    spare: int = 0

    @classmethod
    def empty(
        cls,
        rows: int,
        slots: int,
        kept: tuple[int, int, int],
        dtype: jnp.dtype,
        window: int | None,
        spare: int = 0,
    ) -> Self:
        """Zeros; a ring where the window is shorter than the row. `kept` is `AttentionConfig.cached`.

        With `spare` more slots, 1 + `spare` tokens may be written at a time, and all but the first of them again, as
        other tokens: a ring still holds what these see.
        """
        slots = slots + spare
        if window is not None:
            window = window + spare
        is_ring = window is not None and window < slots
        heads, *sizes = kept
        shape = (rows, heads, window if is_ring else slots)
        keys, values = (jnp.zeros((*shape, size), dtype) for size in sizes)
        scale = jnp.zeros((*shape, 1)) if dtype == jnp.int8 else None
        return cls(keys, values, scale, scale, is_ring, spare)

    @property
    def slots(self) -> int:
        """Tokens that it holds of a row."""
        return self.keys.shape[2]

    def extended(
        self,
        keys: Float[Array, "B T K H"],
        values: Float[Array, "B T K U"],
        start: Int[Array, "B"],
        count: Int[Array, "B"] | None,
    ) -> tuple[Self, VisibleKV]:
        """With T new tokens from each row's own index `start` on, and what these attend to.

        A ring keeps only the first `count` of them, as what lies behind is padding and would be written over tokens; in
        another cache the next write covers padding. What comes of a token does not depend on how many are written at once.
        """
        length = keys.shape[1]
        keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
        keys, values, key_scale, value_scale = self._packed(keys, values)
        new = dataclasses.replace(
            self, keys=keys, values=values, key_scale=key_scale, value_scale=value_scale
        )
        index = start[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        if not self.is_ring:
            written = self._map(lambda cache, part: _write_slots(cache, part, start), new)
            return written, written._read(jnp.arange(self.slots, dtype=jnp.int32)[None])
        stop = start + (length if count is None else count)
        is_kept = (index < stop[:, None]) & (index >= stop[:, None] - self.slots)
        slot = jnp.where(is_kept, index % self.slots, self.slots)
        written = self._map(lambda ring, part: _drop_oldest(ring, part, slot), new)
        if length <= 1 + self.spare:
            return written, written._read(_in_ring(stop, self.slots))
        # The first of the new tokens still see what the last of them are written over.
        both = self._map(lambda ring, part: jnp.concatenate((ring, part), axis=2), new)
        return written, both._read(jnp.concatenate((_in_ring(start, self.slots), index), axis=1))

    def _packed(
        self, keys: Array, values: Array
    ) -> tuple[Array, Array, Array | None, Array | None]:
        if self.key_scale is None:
            return keys.astype(self.keys.dtype), values.astype(self.values.dtype), None, None
        # A scale for each index but that within the head.
        (keys, key_scale), (values, value_scale) = (
            quantize.rounded(x, quantize.INT8, (3,)) for x in (keys, values)
        )
        return keys, values, key_scale, value_scale

    def _map(self, function: Callable[[Array, Array], Array], new: Self) -> Self:
        """A cache made part by part of this one and of new tokens."""
        made = jax.tree.map(function, self, new)
        # One head for all is on every device of tensor.
        heads = "kv_heads" if self.keys.shape[1] > 1 else None
        placed = [constrain(x, "batch", heads, None, None) for x in jax.tree.leaves(made)]
        return jax.tree.unflatten(jax.tree.structure(made), placed)

    def _read(self, index: Array) -> VisibleKV:
        keys, values = self.keys, self.values
        if self.key_scale is not None and self.value_scale is not None:
            keys, values = keys * self.key_scale, values * self.value_scale
        return VisibleKV(keys.swapaxes(1, 2), values.swapaxes(1, 2), index)


def _write_slots(cache: Array, new: Array, start: Array) -> Array:
    """The cache with each row's new entries from its own slot on."""

    def place(row: Array, part: Array, slot: Array) -> Array:
        return jax.lax.dynamic_update_slice(row, part, (0, slot, 0))

    return jax.vmap(place)(cache, new, start)


def _drop_oldest(ring: Array, new: Array, slots: Array) -> Array:
    """The ring with each row's new entries in its own slots, those without one left out."""

    def place(row: Array, part: Array, slot: Array) -> Array:
        return row.at[:, slot].set(part, mode="drop")

    return jax.vmap(place)(ring, new, slots)


def _in_ring(length: Array, slots: int) -> Int[Array, "B S"]:
    """The index of the token in each slot of a ring, once rows have these lengths."""
    last = length[:, None] - 1
    index = last - (last - jnp.arange(slots, dtype=jnp.int32)[None]) % slots
    return jnp.where(index < 0, NOWHERE, index)


EncoderKV = tuple[Float[Array, "B E K H"], Float[Array, "B E K H"]]  # keys and values


class CrossKV(NamedTuple):
    """What an encoder has read, as the layers of a decoder attend to it: each layer's keys and values, by kind."""

    layers: dict[str, tuple[EncoderKV, ...]]
    segments: Int[Array, "B E"]  # 0 is padding


class KVCache(NamedTuple):
    """The cache of a whole model: `layers` mirrors its stacks, a cache for each layer of a kind; `length` counts the tokens read in each row.

    Slots from `length` on may hold anything: no query looks beyond its own index, and the next write covers them.
    """

    layers: dict[str, tuple[LayerCache, ...]]
    length: Int[Array, "B"]
    source: CrossKV | None = None  # of a decoder beside an encoder

    @property
    def slots(self) -> int:
        """Tokens that it holds of a row, where no layer keeps a window alone."""
        return max(layer.slots for layers in self.layers.values() for layer in layers)
