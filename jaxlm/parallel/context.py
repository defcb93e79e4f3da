"""Rows whose tokens lie on several devices: which token lies where, and how keys come round to every query."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Int

from jaxlm.parallel import rules
from jaxlm.parallel.config import AXES, ContextKeys

AXIS = "context"
GATHERED_BYTES = (
    256 * 2**20
)  # a layer's keys, values and scores on one device, beyond which `auto` takes the ring


class Keys(NamedTuple):
    """How queries reach the keys of other devices, and why so."""

    keys: Literal["gather", "ring"]
    reason: str


def choose(
    wanted: ContextKeys,
    *,
    ways: int,
    rows: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    dropout: float,
) -> Keys:
    """How a layer's queries reach keys, by what one device would hold of them: `rows`, `heads` and `kv_heads` are its own.

    Gathered keys cost 2 rows T K H itemsize bytes for all keys and values, and 4 rows N (T / ways) T for the scores.
    Both ways move the same keys; the ring keeps 1 / ways of keys and scores, leaves out the half of the products that
    causality hides, and moves keys while it computes, but as ways - 1 messages one after the other.
    """
    held = 2 * rows * length * kv_heads * head_dim * itemsize
    held += 4 * rows * heads * (length // ways) * length
    says = f"gathered keys, values and scores of a layer are {held / 2**20:.3g} MiB a device"
    if wanted != "auto":
        return Keys(wanted, f"as mesh.context_keys says; {says}")
    if dropout:
        return Keys("gather", f"a ring has no attention dropout; {says}")
    if held <= GATHERED_BYTES:
        return Keys("gather", f"{says}, within {GATHERED_BYTES / 2**20:.0f}")
    return Keys("ring", f"{says}, above {GATHERED_BYTES / 2**20:.0f}")


def order(length: int, parts: int) -> Int[np.ndarray, "T"]:
    """The slot of a row that each place holds when the slots are dealt out to `parts` devices, first device first.

    The row is cut into 2 x parts chunks, and device i holds chunks i and 2 x parts - 1 - i: an early one, whose queries
    see few keys, and a late one, whose queries see as many more. One part keeps the order.

    Raises:
      ValueError: where the chunks would not be equal.
    """
    if parts == 1:
        return np.arange(length, dtype=np.int32)
    if length % (2 * parts):
        raise ValueError(f"{length} slots do not divide into {2 * parts} chunks")
    chunks = np.arange(length, dtype=np.int32).reshape(2, parts, -1)
    return np.stack([chunks[0], chunks[1, ::-1]], axis=1).reshape(-1)


def deal(tree: Any, parts: int) -> Any:
    """A tree of [B, T, ...] arrays with their slots dealt out: a permutation inside of a step; no order of data changes."""
    return _permuted(tree, parts, lambda slots: slots)


def undeal(tree: Any, parts: int) -> Any:
    """What `deal` did, undone."""
    return _permuted(tree, parts, np.argsort)


def _permuted(tree: Any, parts: int, of: Callable[[np.ndarray], np.ndarray]) -> Any:
    if parts == 1:
        return tree

    def moved(x: Array) -> Array:
        rest = (None,) * (x.ndim - 2)
        return rules.constrain(x[:, of(order(x.shape[1], parts))], "batch", "length", *rest)

    return jax.tree.map(moved, tree)


def ways() -> int:
    """Over how many devices of the ambient mesh the tokens of a row are split."""
    return rules.split(jax.sharding.get_abstract_mesh(), "length")


def spec(shape: tuple[int, ...], *axes: str) -> PartitionSpec:
    """The layout of an argument of `on_each`; what does not divide, as one row for all, is whole on every device."""
    grid = jax.sharding.get_abstract_mesh()
    fits = [size % rules.split(grid, axis) == 0 for size, axis in zip(shape, axes, strict=True)]
    return rules.spec(tuple(axis if fit else None for axis, fit in zip(axes, fits, strict=True)))


def on_each(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function` of each device's own part, on the ambient mesh.

    All axes are manual: with only `context`, `jax.vmap(..., spmd_axis_name="pipe")` is refused (jax 0.10 to 0.12). The
    check of what varies over which axis is off, as it fails on a scan under that vmap; no gradient is taken through here.
    """
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=set(AXES), check_vma=False
    )


def passed(tree: Any, parts: int) -> Any:
    """Inside of `on_each`: what the device before held, as each hands its own to the next."""
    to_next = [(i, (i + 1) % parts) for i in range(parts)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, to_next), tree)


def place() -> Array:
    """Inside of `on_each`: the device's number along the axis."""
    return jax.lax.axis_index(AXIS)
