"""Rows whose tokens lie on several devices: which token lies where, and how keys come round to every query."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Int

from jaxlm.parallel import rules
from jaxlm.parallel.config import AXES

AXIS = "context"


def zigzag_order(length: int, parts: int) -> Int[np.ndarray, "T"]:
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


def zigzag_shard(tree: Any, parts: int) -> Any:
    """A tree of [B, T, ...] arrays with their slots dealt out: a permutation inside of a step; no order of data changes."""
    return _permuted(tree, parts, lambda slots: slots)


def zigzag_unshard(tree: Any, parts: int) -> Any:
    """What `deal` did, undone."""
    return _permuted(tree, parts, np.argsort)


def _permuted(tree: Any, parts: int, of: Callable[[np.ndarray], np.ndarray]) -> Any:
    if parts == 1:
        return tree

    def moved(x: Array) -> Array:
        rest = (None,) * (x.ndim - 2)
        return rules.constrain(x[:, of(zigzag_order(x.shape[1], parts))], "batch", "length", *rest)

    return jax.tree.map(moved, tree)


def context_size() -> int:
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
    check of what varies over which axis is off, as it fails on a scan under that vmap.
    """
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=set(AXES), check_vma=False
    )


def of_rows(function: Callable[..., Array]) -> Callable[..., Array]:
    """A `function` of queries, keys and values [B, T, N, H] and a tree of [B, T], of each device's own rows and heads.

    Of all of them where there is no mesh. A gradient may be taken through here: what is whole on several devices gets the
    sum of their parts.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function

    def placed(query: Array, key: Array, value: Array, of_slots: Any) -> Array:
        vectors = spec(key.shape, "batch", "length", "kv_heads", "head_dim")
        slots = jax.tree.map(lambda x: spec(x.shape, "batch", "length"), of_slots)
        return on_each(function, (*(vectors,) * 3, slots), vectors)(query, key, value, of_slots)

    return placed


def ring_permute(tree: Any, parts: int) -> Any:
    """Inside of `on_each`: what the device before held, as each hands its own to the next."""
    to_next = [(i, (i + 1) % parts) for i in range(parts)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, to_next), tree)


def shard_index() -> Array:
    """Inside of `on_each`: the device's number along the axis."""
    return jax.lax.axis_index(AXIS)
