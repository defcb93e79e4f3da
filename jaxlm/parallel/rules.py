"""Logical axes to mesh axes: the one table that says what is split over what."""

import math
from typing import Any

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.parallel.config import flags, nearest

LogicalAxes = tuple[str | None, ...]

# Every logical axis is here; there is no catch-all, so that a new axis has to be thought about.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "length": None,
    "layers": None,
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "head_dim": None,
    "positions": None,
}


def spec(axes: LogicalAxes) -> PartitionSpec:
    """The mesh axes of each dimension. Raises KeyError for a logical axis without a rule."""
    return PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes))


def constrain(x: Array, *axes: str | None) -> Array:
    """Pins the layout of an activation on the ambient mesh (`jax.set_mesh`); without one, does nothing."""
    if len(axes) != x.ndim:
        raise ValueError(f"{len(axes)} axis names for shape {x.shape}")
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes))


def shardings(mesh: Mesh, axes: Any, abstract: Any) -> Any:
    """The sharding of each leaf of a tree, given its tree of logical axes (tuples as leaves) and of shapes.

    Raises:
      ConfigError: where a dimension does not divide by its mesh axes; lists every such leaf.
    """
    misfits: list[tuple[str, str, int, int]] = []

    def place(path: str, leaf: Any, names: LogicalAxes) -> NamedSharding:
        if len(names) != len(leaf.shape):
            raise ValueError(f"{path}: axes {names} for shape {leaf.shape}")
        for name, size in zip(names, leaf.shape, strict=True):
            if name is not None and size % (ways := split(mesh, name)):
                misfits.append((path, name, size, ways))
        return NamedSharding(mesh, spec(names))

    placed = tree.map_with_path(place, abstract, axes)
    if misfits:
        raise _misfit(mesh, abstract, axes, misfits)
    return placed


def split(mesh: Mesh | AbstractMesh, axis: str | None) -> int:
    """Into how many parts a logical axis is split."""
    return _ways(dict(mesh.shape), axis)


def _ways(sizes: dict[str, int], axis: str | None) -> int:
    names = None if axis is None else RULES[axis]
    return math.prod(
        sizes.get(name, 1) for name in ((names,) if isinstance(names, str) else names or ())
    )


def _misfit(
    mesh: Mesh, abstract: Any, axes: Any, misfits: list[tuple[str, str, int, int]]
) -> ConfigError:
    """One line for each logical axis that does not divide, with one leaf as the example; and the nearest meshes that fit."""
    lines: dict[tuple[str, int, int], str] = {}
    for path, name, size, ways in misfits:
        lines.setdefault(
            (name, size, ways), f"{name} = {size} does not divide by {ways} (for example {path})"
        )
    sizes = {
        (name, size)
        for leaf, names in zip(jax.tree.leaves(abstract), _axis_tuples(axes), strict=True)
        for name, size in zip(names, leaf.shape, strict=True)
    }
    fits = [
        fit
        for fit in nearest(dict(mesh.shape), mesh.size)
        if all(size % _ways(fit, name) == 0 for name, size in sizes)
    ]
    return ConfigError(
        f"{len(misfits)} parameter{'s' if len(misfits) > 1 else ''} cannot be split evenly",
        where="mesh " + " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
        why="\n".join(list(lines.values())[:3]),
        fix="\n".join(flags(fit) for fit in fits[:2]),
    )


def _axis_tuples(axes: Any) -> list[LogicalAxes]:
    return jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))
