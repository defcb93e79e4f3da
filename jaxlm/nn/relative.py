"""What is added to scores by how far a key lies from its query."""

import math

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlm.nn.config import RelativeBias
from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import parameter
from jaxlm.parallel.rules import constrain


class RelativePositions(nnx.Module):
    """A number for each head and each bucket of distances; all layers of a stack share the table.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
    """

    def __init__(self, heads: int, config: RelativeBias, *, key: Array, init: Initializer):
        self.config = config
        self.table = parameter(init.table(key, (config.buckets, heads)), "positions", "heads")

    def __call__(self, query: Int[Array, "B T"], key: Int[Array, "B S"]) -> Float[Array, "B N T S"]:
        """The biases of queries and keys at these indices, float32; the batch axis is 1 where all rows have the same."""
        distance = key[:, None, :] - query[:, :, None]
        table = self.table[...].astype(jnp.float32)
        found = table.at[bucket(distance, self.config)].get(mode="promise_in_bounds")
        rows = "batch" if distance.shape[0] > 1 else None
        return constrain(jnp.moveaxis(found, -1, 1), rows, "heads", None, None)


def bucket(distance: Int[Array, "..."], config: RelativeBias) -> Int[Array, "..."]:
    """The bucket of each distance, key minus query: the nearest have one each, those further on share more and more.

    Of n buckets for one direction, a distance d below n / 2 has its own; the others share floor(n/2 + n/2 log(d / (n/2)) /
    log(farthest / (n/2))), at most n - 1. Read both ways, either direction has half of the buckets; else a key after its
    query counts as at 0.
    """
    count = config.buckets // 2 if config.both_ways else config.buckets
    first = jnp.where(distance > 0, count, 0) if config.both_ways else jnp.zeros_like(distance)
    distance = jnp.abs(distance) if config.both_ways else jnp.maximum(-distance, 0)
    exact = count // 2
    share = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact)
    share = share / math.log(config.farthest / exact) * (count - exact)
    wide = jnp.minimum(exact + share.astype(jnp.int32), count - 1)
    return first + jnp.where(distance < exact, distance, wide)
