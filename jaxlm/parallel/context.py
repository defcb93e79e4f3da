"""Context parallelism: rows whose sequence length is split over devices, in zigzag order."""

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
    """Return the slot of a row at each place, first device first, for `parts` devices.

    The row is cut into 2 x parts chunks, and device i holds chunks i and 2 x parts - 1 - i: an
    early one, whose queries see few keys, and a late one, whose queries see many. One part keeps
    the order. Raises ValueError if the chunks would not be equal.
    """
    if parts == 1:
        return np.arange(length, dtype=np.int32)
    if length % (2 * parts):
        raise ValueError(f"{length} slots do not divide into {2 * parts} chunks")
    chunks = np.arange(length, dtype=np.int32).reshape(2, parts, -1)
    return np.stack([chunks[0], chunks[1, ::-1]], axis=1).reshape(-1)


def zigzag_shard(tree: Any, parts: int) -> Any:
    """Return a tree of [B, T, ...] arrays in zigzag order; the order of data does not change."""
    return _permuted(tree, parts, zigzag_order)


def zigzag_unshard(tree: Any, parts: int) -> Any:
    """Undo `zigzag_shard`."""
    return _permuted(tree, parts, lambda *sizes: np.argsort(zigzag_order(*sizes)))


def _permuted(tree: Any, parts: int, order: Callable[[int, int], np.ndarray]) -> Any:
    def permute(x: Array) -> Array:
        axes = ("batch", "length", *(None,) * (x.ndim - 2))
        return rules.constrain(x[:, order(x.shape[1], parts)], *axes)

    return tree if parts == 1 else jax.tree.map(permute, tree)


def context_size() -> int:
    """Return the number of devices of the ambient mesh that split the tokens of a row."""
    return rules.split(jax.sharding.get_abstract_mesh(), "length")


def spec(shape: tuple[int, ...], *axes: str) -> PartitionSpec:
    """Return the layout of an argument of `on_each`; a dimension that does not divide is whole."""
    grid = jax.sharding.get_abstract_mesh()
    fits = [size % rules.split(grid, axis) == 0 for size, axis in zip(shape, axes, strict=True)]
    return rules.spec(tuple(axis if fit else None for axis, fit in zip(axes, fits, strict=True)))


def on_each(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Map `function` over each device's part, on the ambient mesh.

    All axes are manual that no `shard_map` maps yet: `jax.vmap(..., spmd_axis_name="pipe")`
    rejects `context` alone (jax 0.10 to 0.12). The check of varying axes is off, as it fails on a
    scan under that vmap.
    """
    axes = set(AXES) - rules.mapped()
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False
    )


def of_rows(function: Callable[..., Array]) -> Callable[..., Array]:
    """Map a `function` of queries, keys, values [B, T, N, H] and a [B, T] tree over devices.

    Each device has its own rows and heads; without a mesh all are on one. Gradients work: those of
    an argument that several devices hold are summed.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function

    def mapped(query: Array, key: Array, value: Array, slots: Any) -> Array:
        vectors = spec(key.shape, "batch", "length", "kv_heads", "head_dim")
        specs = jax.tree.map(lambda x: spec(x.shape, "batch", "length"), slots)
        return on_each(function, (*(vectors,) * 3, specs), vectors)(query, key, value, slots)

    return mapped


def ring_permute(tree: Any, parts: int) -> Any:
    """Inside of `on_each`: send a tree to the next device, and return the previous one's."""
    to_next = [(i, (i + 1) % parts) for i in range(parts)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, to_next), tree)


def shard_index() -> Array:
    """Inside of `on_each`: return the device's number along the axis."""
    return jax.lax.axis_index(AXIS)
