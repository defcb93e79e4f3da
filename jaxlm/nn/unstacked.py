"""Layers one after the other, each with parameters and a cache of its own."""

from typing import Any

import jax
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from jaxlm.core.mean import Mean
from jaxlm.nn.attention import CrossAttention, Memory
from jaxlm.nn.block import Block
from jaxlm.nn.cache import Known, LayerCache
from jaxlm.nn.linear import GroupedLinear, Linear
from jaxlm.ops.masks import Mask

Caches = dict[str, tuple[LayerCache, ...]]  # by kind: one for each layer of it


class Unstacked(nnx.Module):
    """The blocks of a stack in a row; layer i is of kind i % kinds."""

    def __init__(self, blocks: list[Block], kinds: int):
        self.blocks, self.kinds = nnx.List(blocks), kinds

    @classmethod
    def of(cls, stacked: dict[str, tuple[Any, Any]], depth: int) -> "Unstacked":
        """Cut out of what is stacked: for each kind, the graph of one block and the state of all of them."""
        kinds = len(stacked)
        blocks = []
        for number in range(depth):
            graphdef, state = stacked[str(number % kinds)]
            own = jax.tree.map(lambda leaf, at=number // kinds: leaf[at], state)
            blocks.append(nnx.merge(graphdef, own))
        return cls(blocks, kinds)

    def settle(self) -> None:
        """Holds each weight as a few rows meet it fastest, so that no product casts it again."""
        for block in self.blocks:
            for _, module in nnx.iter_graph(block):
                if isinstance(module, (Linear, GroupedLinear)):
                    module.settle()

    def across(self, values: Float[Array, "B S D"]) -> dict[str, tuple[Known, ...]]:
        """Each layer's keys and values of what an encoder has read, by kind; for a `Memory`."""
        found: dict[str, tuple[Known, ...]] = {}
        for number, block in enumerate(self.blocks):
            assert isinstance(block.cross, CrossAttention)
            name = str(number % self.kinds)
            found[name] = (*found.get(name, ()), block.cross.across(values))
        return found

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"],
        mask: Mask,
        memory: Memory | None = None,
        caches: Caches,
        start: Int[Array, "B"],
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T D"], Caches, dict[str, Mean]]:
        """As `Stack`, whose caches are never put together: a step then writes into each where it lies."""
        keys = [None] * len(self.blocks) if key is None else jax.random.split(key, len(self.blocks))
        written: dict[str, tuple[LayerCache, ...]] = dict.fromkeys(caches, ())
        losses = []
        known = None if memory is None else memory.layers
        for number, (block, own) in enumerate(zip(self.blocks, keys, strict=True)):
            name, place = str(number % self.kinds), number // self.kinds
            x, cache, added = block(
                x,
                positions=positions,
                mask=mask,
                memory=memory,
                known=None if known is None else known[name][place],
                cache=caches[name][place],
                start=start,
                key=own,
            )
            assert cache is not None
            written[name] += (cache,)
            losses.append(added)
        return x, written, Mean.merged(*losses)
