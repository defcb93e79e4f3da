"""Keys and values of tokens already read."""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


class LayerCache(NamedTuple):
    """One layer's keys and values (with a leading layer axis where layers are stacked)."""

    keys: Float[Array, "B S K H"]
    values: Float[Array, "B S K H"]

    def write(
        self, keys: Float[Array, "B T K H"], values: Float[Array, "B T K H"], start: Int[Array, "B"]
    ) -> Self:
        """Puts T new entries into each row from its own slot `start` on."""

        def place(cache: Array, new: Array, slot: Array) -> Array:
            return jax.lax.dynamic_update_slice(cache, new.astype(cache.dtype), (slot, 0, 0))

        return type(self)(
            jax.vmap(place)(self.keys, keys, start), jax.vmap(place)(self.values, values, start)
        )


class KVCache(NamedTuple):
    """The cache of a whole model: `layers` mirrors its stack, `length` counts the tokens read in each row.

    Slots from `length` on may hold anything: no query looks beyond its own index, and the next write covers them.
    """

    layers: dict[str, LayerCache]
    length: Int[Array, "B"]

    @classmethod
    def empty(
        cls, shapes: dict[str, tuple[int, ...]], rows: int, slots: int, dtype: jnp.dtype
    ) -> Self:
        """Zeroed caches. A shape is (kv_heads, head_dim), with the number of stacked layers in front where there are any."""

        def zeros(shape: tuple[int, ...]) -> Array:
            *stacked, heads, size = shape
            return jnp.zeros((*stacked, rows, slots, heads, size), dtype)

        layers = {name: LayerCache(zeros(shape), zeros(shape)) for name, shape in shapes.items()}
        return cls(layers, jnp.zeros((rows,), jnp.int32))

    @property
    def slots(self) -> int:
        """Tokens a row can hold."""
        return next(iter(self.layers.values())).keys.shape[-3]
