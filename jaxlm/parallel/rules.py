"""Where arrays lie on a mesh, by the names of their dimensions."""

from typing import Any

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.parallel.config import OFFERED, flags, nearest, offered, shown
from jaxlm.parallel.logical import RULES, LogicalAxes, ways


def spec(axes: LogicalAxes) -> PartitionSpec:
    """The mesh axes of each dimension. Raises KeyError for a logical axis without a rule."""
    return PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes))


def constrain(x: Array, *axes: str | None) -> Array:
    """Pins the layout of an activation on the ambient mesh (`jax.set_mesh`); without one, does nothing."""
    if len(axes) != x.ndim:
        raise ValueError(f"{len(axes)} axis names for shape {x.shape}")
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(tuple(map(_placed, axes, x.shape))))


def _placed(axis: str | None, size: int) -> str | None:
    """The axis, or None for a length that `context` cannot split: the one token of a decode step, a prompt."""
    grid = jax.sharding.get_abstract_mesh()
    return None if axis == "length" and size % split(grid, axis) else axis


def shardings(mesh: Mesh, axes: Any, abstract: Any, *, is_split: bool = True) -> Any:
    """The sharding of each leaf of a tree, given its tree of logical axes (tuples as leaves) and of shapes.

    Without `is_split`, the fsdp axis holds copies instead of parts, as ZeRO 1 and 2 keep parameters.

    Raises:
      ConfigError: where a dimension does not divide by its mesh axes; lists every such leaf.
    """
    misfits: list[tuple[str, str, int, int]] = []

    def place(path: str, leaf: Any, names: LogicalAxes) -> NamedSharding:
        if len(names) != len(leaf.shape):
            raise ValueError(f"{path}: axes {names} for shape {leaf.shape}")
        for name, size in zip(names, leaf.shape, strict=True):
            if name is not None and size % (parts := split(mesh, name)):
                misfits.append((path, name, size, parts))
        return NamedSharding(mesh, spec(names) if is_split else _copied(spec(names)))

    placed = tree.map_with_path(place, abstract, axes)
    if misfits:
        raise _misfit(mesh, abstract, axes, misfits)
    return placed


def split(mesh: Mesh | AbstractMesh, axis: str | None) -> int:
    """Into how many parts a logical axis is split."""
    return ways(dict(mesh.shape), axis)


def _copied(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(None if entry == "fsdp" else entry for entry in spec))


def _misfit(
    mesh: Mesh, abstract: Any, axes: Any, misfits: list[tuple[str, str, int, int]]
) -> ConfigError:
    """One line for each logical axis that does not divide, with one leaf as the example; and the nearest meshes that fit."""
    lines: dict[tuple[str, int, int], str] = {}
    for path, name, size, parts in misfits:
        lines.setdefault(
            (name, size, parts), f"{name} = {size} does not divide by {parts} (for example {path})"
        )
    named = jax.tree.map(
        lambda leaf, names: frozenset(zip(names, leaf.shape, strict=True)), abstract, axes
    )
    sizes = frozenset[tuple[str | None, int]]().union(*jax.tree.leaves(named))

    def line(fit: dict[str, int]) -> str:
        is_even = all(size % ways(fit, name) == 0 for name, size in sizes)
        return flags(fit, mesh.shape) if is_even else ""

    fixes = offered(mesh.shape, nearest(mesh.shape, mesh.size), line)
    return ConfigError(
        f"{len(misfits)} parameter{'s' if len(misfits) > 1 else ''} cannot be split evenly",
        where=f"mesh {shown(mesh.shape)}",
        why="; ".join(lines.values()),
        fix="\n".join(fixes[:OFFERED]),
    )
