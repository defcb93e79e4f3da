"""KV cache: keys and values of the tokens read so far."""

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

LEAST_REACH = 128  # slots
NOWHERE = jnp.iinfo(jnp.int32).max  # index of an empty slot: no query sees as far


class VisibleKV(NamedTuple):
    """Keys and values that new queries attend to, and their indices in the row."""

    keys: Float[Array, "B S K H"]
    values: Float[Array, "B S K U"]
    indices: Int[Array, "B S"] | Int[Array, "1 S"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys", "values", "key_scale", "value_scale"),
    meta_fields=("is_ring", "spare", "leading"),
)
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """KV cache of one layer; of latent attention, the shared rotated key, and the latent as value.

    Token i of a row is in slot i, or in a ring (a layer with a window of S keys) in slot i % S,
    where it replaces token i - S. Virtual tokens have indices from -`leading` on: then no cache is
    a ring, and token i is in slot `leading` + i. With scales, the numbers are int8: the scale is
    the largest magnitude of a head's key or value over 127, and the error half a scale, at most
    0.4% of it.

    Heads come before slots, the layout that attention's products read: otherwise the whole cache
    would be transposed for every token.
    """

    keys: Array  # [B, K, S, H]
    values: Array  # [B, K, S, U]
    key_scale: Float[Array, "B K S 1"] | None = None
    value_scale: Float[Array, "B K S 1"] | None = None
    is_ring: bool = False
    spare: int = 0
    leading: int = 0

    @classmethod
    def empty(
        cls,
        rows: int,
        slots: int,
        sizes: tuple[int, int, int],
        dtype: jnp.dtype,
        window: int | None,
        spare: int = 0,
        leading: int = 0,
    ) -> Self:
        """Return a cache of zeros, a ring if the window is shorter than the row.

        Args:
          rows, slots: number of sequences, and their largest length.
          sizes: heads, key size and value size, as `AttentionConfig.cached`.
          dtype: of keys and values; int8 adds scales.
          window: keys visible to a query; by default (None) all.
          spare: added slots, so that 1 + `spare` tokens can be written at once and all but the
            first of them overwritten; a ring still holds all that these see.
          leading: virtual tokens before each row.
        """
        slots = leading + slots + spare
        if leading:  # outside of any window
            window = None
        if window is not None:
            window = window + spare
        is_ring = window is not None and window < slots
        heads, *lengths = sizes
        shape = (rows, heads, window if is_ring else slots)
        keys, values = (jnp.zeros((*shape, length), dtype) for length in lengths)
        scale = jnp.zeros((*shape, 1)) if dtype == jnp.int8 else None
        return cls(keys, values, scale, scale, is_ring, spare, leading)

    @property
    def slots(self) -> int:
        """Number of tokens that fit into a row, virtual ones included."""
        return self.keys.shape[2]

    def preceded(self, keys: Float[Array, "B n K H"], values: Float[Array, "B n K U"]) -> Self:
        """Return the cache with the keys and values of its virtual tokens."""
        start = jnp.full((len(keys),), -self.leading, jnp.int32)
        return self.append(keys, values, start, None)[0]

    def append(
        self,
        keys: Float[Array, "B T K H"],
        values: Float[Array, "B T K U"],
        start: Int[Array, "B"],
        count: Int[Array, "B"] | None,
    ) -> tuple[Self, VisibleKV]:
        """Write T tokens from each row's index `start` on; return the cache and the visible keys.

        A ring stores only the first `count` tokens, since padding would overwrite tokens; in
        another cache the next write replaces padding. The result of a token does not depend on
        the number of tokens written at once.
        """
        length = keys.shape[1]
        keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
        keys, values, key_scale, value_scale = self._quantized(keys, values)
        new = dataclasses.replace(
            self, keys=keys, values=values, key_scale=key_scale, value_scale=value_scale
        )
        index = start[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        if not self.is_ring:
            slot = start + self.leading
            written = self._map(lambda cache, part: _write_slots(cache, part, slot), new)
            index = jnp.arange(-self.leading, self.slots - self.leading, dtype=jnp.int32)
            return written, written._visible(index[None])
        stop = start + (length if count is None else count)
        is_stored = (index < stop[:, None]) & (index >= stop[:, None] - self.slots)
        slot = jnp.where(is_stored, index % self.slots, self.slots)
        written = self._map(lambda ring, part: _overwrite_oldest(ring, part, slot), new)
        if length <= 1 + self.spare:
            return written, written._visible(_ring_index(stop, self.slots))
        # The first new tokens still see the slots that the last ones overwrite.
        both = self._map(lambda ring, part: jnp.concatenate((ring, part), axis=2), new)
        index = jnp.concatenate((_ring_index(start, self.slots), index), axis=1)
        return written, both._visible(index)

    def first(self, size: int) -> VisibleKV:
        """Return the first slots of a cache that is no ring and has no virtual tokens."""
        part = jax.tree.map(lambda x: x[:, :, :size], self)
        return part._visible(jnp.arange(size, dtype=jnp.int32)[None])

    def _quantized(
        self, keys: Array, values: Array
    ) -> tuple[Array, Array, Array | None, Array | None]:
        if self.key_scale is None:
            return keys.astype(self.keys.dtype), values.astype(self.values.dtype), None, None
        # One scale for each vector of a head.
        (keys, key_scale), (values, value_scale) = (
            quantize.rounded(x, quantize.INT8, (3,)) for x in (keys, values)
        )
        return keys, values, key_scale, value_scale

    def _map(self, function: Callable[[Array, Array], Array], new: Self) -> Self:
        """Apply `function` to each array of this cache and of the new tokens."""
        mapped = jax.tree.map(function, self, new)
        # A single head is on every device of the tensor axis.
        heads = "kv_heads" if self.keys.shape[1] > 1 else None
        placed = [constrain(x, "batch", heads, None, None) for x in jax.tree.leaves(mapped)]
        return jax.tree.unflatten(jax.tree.structure(mapped), placed)

    def _visible(self, index: Array) -> VisibleKV:
        keys, values = self.keys, self.values
        if self.key_scale is not None and self.value_scale is not None:
            keys, values = keys * self.key_scale, values * self.value_scale
        return VisibleKV(keys.swapaxes(1, 2), values.swapaxes(1, 2), index)


@jax.vmap
def _write_slots(row: Array, new: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice(row, new, (0, start, 0))


@jax.vmap
def _overwrite_oldest(row: Array, new: Array, slots: Array) -> Array:
    """Write new entries of a ring; those with an invalid slot are dropped."""
    return row.at[:, slots].set(new, mode="drop")


def _ring_index(length: Array, slots: int) -> Int[Array, "B S"]:
    """Return the index of the token in each slot of a ring, for rows of these lengths."""
    last = length[:, None] - 1
    index = last - (last - jnp.arange(slots, dtype=jnp.int32)[None]) % slots
    return jnp.where(index < 0, NOWHERE, index)


def reaches(slots: int) -> tuple[int, ...]:
    """Return the numbers of slots that layers can read, see `KVCache`; the last is `slots`.

    Example:
      >>> reaches(1000)
      (250, 500, 1000)
    """
    halves = [slots]
    while halves[-1] % 2 == 0 and halves[-1] // 2 >= LEAST_REACH:
        halves.append(halves[-1] // 2)
    return tuple(reversed(halves))


EncoderKV = tuple[Float[Array, "B E K H"], Float[Array, "B E K H"]]  # keys and values


class CrossKV(NamedTuple):
    """Keys and values of an encoder's outputs for each layer of a decoder, by kind of layer."""

    layers: dict[str, tuple[EncoderKV, ...]]
    segments: Int[Array, "B E"]  # 0 is padding


class KVCache(NamedTuple):
    """KV cache of a model: by stack and kind, a cache for each layer.

    `length` counts the tokens read in each row, without virtual tokens before it. Slots from
    `length` on may hold anything: no query looks beyond its own index, and the next write replaces
    them. With `reach`, the layers read about as many slots of each row as it counts, and the others
    hold nothing that a query of interest sees.
    """

    layers: dict[str, tuple[LayerCache, ...]]
    length: Int[Array, "B"]
    source: CrossKV | None = None  # of an encoder-decoder
    reach: Int[Array, ""] | None = None

    @property
    def slots(self) -> int:
        """Number of tokens that fit into a row, if some layer has no window."""
        return max(layer.slots for layers in self.layers.values() for layer in layers)
