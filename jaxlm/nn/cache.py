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
        length, new = keys.shape[1], self.entries(keys, values)
        index = start[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        if not self.is_ring:
            slot = start + self.leading
            written = self._map(lambda cache, part: _write_slots(cache, part, slot), new)
            index = jnp.arange(-self.leading, self.slots - self.leading, dtype=jnp.int32)
            return written, written._visible(index[None])
        stop = start + (length if count is None else count)
        is_stored = (index < stop[:, None]) & (index >= stop[:, None] - self.slots)
        slot = jnp.where(is_stored, index % self.slots, self.slots)
        written = self.overwritten(new, slot)
        if length <= 1 + self.spare:
            return written, written._visible(_ring_index(stop, self.slots))
        # The first new tokens still see the slots that the last ones overwrite.
        both = self._map(lambda ring, part: jnp.concatenate((ring, part), axis=2), new)
        index = jnp.concatenate((_ring_index(start, self.slots), index), axis=1)
        return written, both._visible(index)

    def entries(self, keys: Float[Array, "B T K H"], values: Float[Array, "B T K U"]) -> Self:
        """Return tokens as the cache stores them."""
        keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
        keys, values, key_scale, value_scale = self._quantized(keys, values)
        return dataclasses.replace(
            self, keys=keys, values=values, key_scale=key_scale, value_scale=value_scale
        )

    def overwritten(self, new: Self, slots: Int[Array, "B T"]) -> Self:
        """Return the cache with new entries in these slots; those in slot `self.slots` are lost."""
        return self._map(lambda cache, part: _scatter_slots(cache, part, slots), new)

    def visible(self, first: int) -> VisibleKV:
        """Return all keys and values of a block whose first token has this index."""
        return self._visible(first + jnp.arange(self.slots, dtype=jnp.int32)[None])

    def row(self, row: Array) -> Self:
        """Return one row."""
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), self)

    def with_row(self, row: Array, new: Self) -> Self:
        """Return the cache with a row replaced by what `row` returned."""
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, row, 0), self, new
        )

    def part(self, row: Array, start: Array, size: int) -> "LayerCache":
        """Return the `size` tokens of a row from an index on; the cache is no ring."""
        place = (row, 0, self.leading + start, 0)
        return jax.tree.map(
            lambda x: jax.lax.dynamic_slice(x, place, (1, x.shape[1], size, x.shape[3])), self
        )

    def with_part(self, row: Array, start: Array, part: "LayerCache") -> Self:
        """Return the cache with what `part` returned, written to a row from an index on."""
        place = (row, 0, self.leading + start, 0)
        return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice(x, new, place), self, part)

    def cleared(self, row: Array) -> Self:
        """Return the cache with zeros in the tokens of a row."""
        return jax.tree.map(lambda x: x.at[row, :, self.leading :].set(0), self)

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
def _scatter_slots(row: Array, new: Array, slots: Array) -> Array:
    """Write new entries; those with a slot beyond the last are dropped."""
    return row.at[:, slots].set(new, mode="drop")


def _ring_index(length: Array, slots: int) -> Int[Array, "B S"]:
    """Return the index of the token in each slot of a ring, for rows of these lengths."""
    last = length[:, None] - 1
    index = last - (last - jnp.arange(slots, dtype=jnp.int32)[None]) % slots
    return jnp.where(index < 0, NOWHERE, index)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("blocks", "only"), meta_fields=("starts",)
)
@dataclasses.dataclass(frozen=True)
class BlockedCache:
    """KV cache of one layer without a window, whose slots are in blocks that are arrays apart.

    Attention reads the blocks that have tokens, each as it is in memory: XLA copies a part of an
    array before a product reads it, which took twice the time (8 rows, 12 heads of 64, 128 of 512
    slots: 0.42 ms a layer, 0.94 as parts of one array, 1.9 for all slots; jax 0.12, CPU).
    """

    blocks: tuple[LayerCache, ...]
    starts: tuple[int, ...]  # index of the first token of each
    only: Int[Array, ""] | None = None  # the one row that is written and read

    @classmethod
    def of(cls, cache: LayerCache, block: int) -> "BlockedCache":
        """Return an empty cache in blocks: two of `block` slots, then each as long as all before.

        It has no spare slots: what is written beyond the last block is lost, and no token of a row
        sees it.

        Each block is compiled apart (a GPT-2 of 12 layers and 4 blocks: 13.6 s of processor for the
        engine, 7.4 s for one block), so there are few, and at most half of what is read is unused.
        """
        starts, slots = [0], cache.slots - cache.spare
        while (start := max(2 * starts[-1], block)) < slots:
            starts.append(start)
        stops = [*starts[1:], slots]
        blocks = [
            jax.tree.map(lambda x, start=start, stop=stop: x[:, :, start:stop], cache)
            for start, stop in zip(starts, stops, strict=True)
        ]
        return cls(tuple(blocks), tuple(starts))

    @property
    def slots(self) -> int:
        """Number of tokens that fit into a row."""
        return sum(each.slots for each in self.blocks)

    @property
    def is_ring(self) -> bool:
        """Return False, see `LayerCache`."""
        return False

    def row(self, row: Array) -> Self:
        """Return the cache such that tokens are of one row; other rows are not copied."""
        return dataclasses.replace(self, only=row)

    def with_row(self, row: Array, new: Self) -> Self:
        """Return the cache with what `row` returned, after new tokens."""
        return dataclasses.replace(new, only=None)

    def written(
        self, keys: Float[Array, "B T K H"], values: Float[Array, "B T K U"], start: Int[Array, "B"]
    ) -> Self:
        """Return the cache with T tokens from each row's index `start` on.

        Those of `row` must be in one block.
        """
        new = self.blocks[0].entries(keys, values)
        if self.only is not None:
            return self.with_part(self.only, start[0], new)
        index = start[:, None] + jnp.arange(keys.shape[1], dtype=jnp.int32)[None]

        def placed(block: LayerCache, first: int) -> LayerCache:
            is_here = (index >= first) & (index < first + block.slots)
            return block.overwritten(new, jnp.where(is_here, index - first, block.slots))

        return self._map(placed)

    def visible(self, number: int) -> VisibleKV:
        """Return all keys and values of a block."""
        block = self.blocks[number]
        block = block if self.only is None else block.row(self.only)
        return block.visible(self.starts[number])

    def part(self, row: Array, start: Array, size: int) -> LayerCache:
        """Return the `size` tokens of a row from an index on, all in one block."""
        branches = [
            functools.partial(lambda block, first: block.part(row, start - first, size), *pair)
            for pair in zip(self.blocks, self.starts, strict=True)
        ]
        return jax.lax.switch(self._number(start), branches)

    def with_part(self, row: Array, start: Array, part: LayerCache) -> Self:
        """Return the cache with what `part` returned, written to a row from an index on."""
        length = part.slots

        def placed(block: LayerCache, first: int) -> LayerCache:
            is_here = (start >= first) & (start < first + block.slots)
            place = jnp.clip(start - first, 0, block.slots - length)
            before = block.part(row, place, length)
            chosen = jax.tree.map(lambda x, y: jnp.where(is_here, x, y), part, before)
            return block.with_part(row, place, chosen)

        return self._map(placed)

    def cleared(self, row: Array) -> Self:
        """Return the cache with zeros in the tokens of a row."""
        return self._map(lambda block, _: block.cleared(row))

    def _number(self, start: Array) -> Array:
        return jnp.searchsorted(jnp.asarray(self.starts), start, side="right") - 1

    def _map(self, function: Callable[[LayerCache, int], LayerCache]) -> Self:
        blocks = tuple(map(function, self.blocks, self.starts))
        return dataclasses.replace(self, blocks=blocks)


AnyCache = LayerCache | BlockedCache


EncoderKV = tuple[Float[Array, "B E K H"], Float[Array, "B E K H"]]  # keys and values


class CrossKV(NamedTuple):
    """Keys and values of an encoder's outputs for each layer of a decoder, by kind of layer."""

    layers: dict[str, tuple[EncoderKV, ...]]
    segments: Int[Array, "B E"]  # 0 is padding


class KVCache(NamedTuple):
    """KV cache of a model: by stack and kind, a cache for each layer.

    `length` counts the tokens read in each row, without virtual tokens before it. Slots from
    `length` on may hold anything finite: no query looks beyond its own index, and the next write
    replaces them. With `reach`, a `BlockedCache` reads the blocks that begin below it alone, and
    the others hold nothing that a query of interest sees.
    """

    layers: dict[str, tuple[AnyCache, ...]]
    length: Int[Array, "B"]
    source: CrossKV | None = None  # of an encoder-decoder
    reach: Int[Array, ""] | None = None

    @property
    def slots(self) -> int:
        """Number of tokens that fit into a row, if some layer has no window."""
        return max(layer.slots for layers in self.layers.values() for layer in layers)
