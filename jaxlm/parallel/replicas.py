"""Whether devices that should hold the same numbers do."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jaxlm.core import tree
from jaxlm.parallel import host

ODD = np.uint32(
    2654435761
)  # Knuth's multiplier: neighbours get unlike weights, so a swap shows too


class Replicas:
    """Compares the copies of a sharded tree, where they lie: each device sums up its own part of every leaf.

    The sum is over the bits, weighted by place, modulo 2^32; one that was flipped changes it. Only the sums travel.
    """

    def __init__(self, mesh: Mesh, shardings: Any):
        self._mesh = mesh
        self._shardings = tree.leaves(shardings)
        specs = {path: sharding.spec for path, sharding in self._shardings.items()}
        every = PartitionSpec(mesh.axis_names)
        self._sums: Callable[[dict[str, Array]], dict[str, Array]] = jax.jit(
            jax.shard_map(
                lambda leaves: {path: _sum(leaf)[None] for path, leaf in leaves.items()},
                mesh=mesh,
                in_specs=(specs,),
                out_specs=dict.fromkeys(specs, every),
                check_vma=False,
            )
        )

    def differences(self, values: Any) -> list[str]:
        """Each leaf with copies that differ, and the devices whose copy is not that of most; empty where all agree."""
        leaves = tree.leaves(values)
        found = []
        devices = list(self._mesh.devices.flat)
        for path, sums in host.fetch(self._sums(leaves)).items():
            places = self._shardings[path].devices_indices_map(leaves[path].shape)
            copies: dict[str, list[int]] = {}
            for number, device in enumerate(devices):
                copies.setdefault(str(places[device]), []).append(number)
            for numbers in copies.values():
                seen = [int(sums[number]) for number in numbers]
                usual = max(set(seen), key=seen.count)
                odd = [
                    str(devices[n])
                    for n, value in zip(numbers, seen, strict=True)
                    if value != usual
                ]
                if odd:
                    found.append(f"{path} on {', '.join(odd)}")
        return found

    def changes(self, one: Any, other: Any) -> list[str]:
        """Each leaf that is not the same bits in two trees, and the devices where; empty where all are."""
        sums = [host.fetch(self._sums(tree.leaves(values))) for values in (one, other)]
        devices = list(self._mesh.devices.flat)
        return [
            f"{path} on {', '.join(str(devices[n]) for n in np.flatnonzero(sums[0][path] != sums[1][path]))}"
            for path in sums[0]
            if (sums[0][path] != sums[1][path]).any()
        ]


def _sum(leaf: Array) -> Array:
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[leaf.dtype.itemsize]
    words = jax.lax.bitcast_convert_type(leaf, bits).astype(jnp.uint32).ravel()
    return jnp.sum(
        words * (2 * jnp.arange(words.size, dtype=jnp.uint32) * ODD + 1), dtype=jnp.uint32
    )
