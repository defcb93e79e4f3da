"""Shardings of arrays by the logical names of their dimensions."""

from typing import Any

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.parallel.config import format_mesh, layout_fixes, mesh_error, mesh_flags, nearest_layouts
from jaxlm.parallel.logical import RULES, LogicalAxes, mesh_axes, ways

# Compiler options by platform that were measured to pay; numbers are in scripts/LOG.md.
COMPILER_OPTIONS = {
    # XLA for CPU copies each array of a donated state that is read twice before its overwrite.
    "cpu": {"xla_cpu_copy_insertion_use_region_analysis": True}
}
Misfit = tuple[str, str, int, int]  # leaf, logical axis, its size, and its parts on the mesh


def compiler_options(mesh: Mesh | AbstractMesh) -> dict[str, bool]:
    """Return the options for a program that overwrites its arguments; none without devices."""
    if isinstance(mesh, AbstractMesh):
        return {}
    return COMPILER_OPTIONS.get(mesh.devices.flat[0].platform, {})


def spec(axes: LogicalAxes) -> PartitionSpec:
    """Return the mesh axes of each dimension, without those of `mapped`.

    Raises KeyError for an axis without a rule.
    """
    outer = mapped()
    if not outer:
        return PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes))
    return PartitionSpec(*(tuple(n for n in mesh_axes(a) if n not in outer) or None for a in axes))


def mapped() -> frozenset[str]:
    """Return the mesh axes over which a `shard_map` maps what is traced: a part is whole there."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def constrain(x: Array, *axes: str | None) -> Array:
    """Constrain an activation on the ambient mesh (`jax.set_mesh`); identity without a mesh.

    A length that `context` cannot split stays whole: one token of a decode step, a prompt.
    """
    if len(axes) != x.ndim:
        raise ValueError(f"{len(axes)} axis names for shape {x.shape}")
    grid = jax.sharding.get_abstract_mesh()
    if grid.empty:
        return x
    pairs = zip(axes, x.shape, strict=True)
    placed = (None if a == "length" and size % split(grid, a) else a for a, size in pairs)
    return jax.lax.with_sharding_constraint(x, spec(tuple(placed)))


def shardings(mesh: Mesh, axes: Any, abstract: Any, *, is_split: bool = True) -> Any:
    """Return the sharding of each leaf, from trees of logical axes (tuples) and of shapes.

    Without `is_split`, fsdp holds copies instead of parts, as ZeRO 1 and 2 do with parameters.
    Raises ConfigError if dimensions do not divide by their mesh axes; lists every such leaf.
    """
    misfits: list[Misfit] = []

    def place(path: str, leaf: Any, names: LogicalAxes) -> NamedSharding:
        if len(names) != len(leaf.shape):
            raise ValueError(f"{path}: axes {names} for shape {leaf.shape}")
        for name, size in zip(names, leaf.shape, strict=True):
            if name is not None and size % (parts := split(mesh, name)):
                misfits.append((path, name, size, parts))
        entries = spec(names)
        if not is_split:
            entries = PartitionSpec(*(None if entry == "fsdp" else entry for entry in entries))
        return NamedSharding(mesh, entries)

    placed = tree.map_with_path(place, abstract, axes)
    if misfits:
        raise _misfit(mesh, abstract, axes, misfits)
    return placed


def split(mesh: Mesh | AbstractMesh, axis: str | None) -> int:
    """Return the number of parts of a logical axis, without mesh axes that a `shard_map` maps."""
    outer = mesh.manual_axes if isinstance(mesh, AbstractMesh) else ()
    return ways({name: size for name, size in mesh.shape.items() if name not in outer}, axis)


def _misfit(mesh: Mesh, abstract: Any, axes: Any, misfits: list[Misfit]) -> ConfigError:
    """Return an error with a line for each axis, with one leaf, and the nearest possible meshes."""
    lines: dict[tuple[str, int, int], str] = {}
    for path, name, size, parts in misfits:
        line = f"{name} = {size} does not divide by {parts} (for example {path})"
        lines.setdefault((name, size, parts), line)
    named = jax.tree.map(
        lambda leaf, names: frozenset(zip(names, leaf.shape, strict=True)), abstract, axes
    )
    sizes = frozenset[tuple[str | None, int]]().union(*jax.tree.leaves(named))

    def fix(layout: dict[str, int]) -> str:
        is_even = all(size % ways(layout, name) == 0 for name, size in sizes)
        return mesh_flags(layout, mesh.shape) if is_even else ""

    fixes = layout_fixes(mesh.shape, nearest_layouts(mesh.shape, mesh.size), fix)
    what = f"{len(misfits)} parameter{'s' if len(misfits) > 1 else ''} cannot be split evenly"
    where, why = f"mesh {format_mesh(mesh.shape)}", ["; ".join(lines.values())]
    return mesh_error(what, where, why, fixes)
