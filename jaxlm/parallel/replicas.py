"""Comparison of the copies of an array on different devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jaxlm.core import tree
from jaxlm.parallel import host

# Knuth's multiplier: adjacent words get different weights, so a swap changes the sum too.
ODD = np.uint32(2654435761)


class Replicas:
    """Checksums of a sharded tree: each device sums its own part of every leaf.

    The sum is over the bits, weighted by index, modulo 2^32, so one flipped bit changes it. Only
    the sums leave the devices.
    """

    def __init__(self, mesh: Mesh, shardings: Any):
        self._devices = list(mesh.devices.flat)
        self._shardings = tree.leaves(shardings)
        specs = {path: sharding.spec for path, sharding in self._shardings.items()}
        sums = jax.shard_map(
            lambda leaves: {path: _sum(leaf)[None] for path, leaf in leaves.items()},
            mesh=mesh,
            in_specs=(specs,),
            out_specs=dict.fromkeys(specs, PartitionSpec(mesh.axis_names)),
            check_vma=False,
        )
        self._sums: Callable[[dict[str, Array]], dict[str, Array]] = jax.jit(sums)

    def differences(self, values: Any) -> list[str]:
        """Return each leaf with copies that differ, and the devices in the minority."""
        leaves = tree.leaves(values)
        lines = []
        for path, sums in host.fetch(self._sums(leaves)).items():
            parts = self._shardings[path].devices_indices_map(leaves[path].shape)
            copies: dict[str, list[int]] = {}
            for number, device in enumerate(self._devices):
                copies.setdefault(str(parts[device]), []).append(number)
            for numbers in copies.values():
                values_of = [int(sums[number]) for number in numbers]
                usual = max(set(values_of), key=values_of.count)
                pairs = zip(numbers, values_of, strict=True)
                if odd := [str(self._devices[n]) for n, value in pairs if value != usual]:
                    lines.append(f"{path} on {', '.join(odd)}")
        return lines

    def changes(self, one: Any, other: Any) -> list[str]:
        """Return each leaf whose bits differ between two trees, and the devices."""
        sums, others = (host.fetch(self._sums(tree.leaves(values))) for values in (one, other))
        changed = {path: np.flatnonzero(sums[path] != others[path]) for path in sums}
        return [
            f"{path} on {', '.join(str(self._devices[n]) for n in numbers)}"
            for path, numbers in changed.items()
            if numbers.size
        ]


def _sum(leaf: Array) -> Array:
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[leaf.dtype.itemsize]
    words = jax.lax.bitcast_convert_type(leaf, bits).astype(jnp.uint32).ravel()
    weights = 2 * jnp.arange(words.size, dtype=jnp.uint32) * ODD + 1
    return jnp.sum(words * weights, dtype=jnp.uint32)
