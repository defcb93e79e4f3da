"""Division of the work on stacked matrices over the devices of a mesh.

An optimizer that multiplies or decomposes matrices of blocks needs whole ones, while their rows and
columns are split over `fsdp` and `tensor`. Each device computes with some of the whole matrices, or
with columns of every one if the mesh does not divide the stack.
"""

import math
from typing import NamedTuple

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec

from jaxlm.parallel.logical import LogicalAxes, mesh_axes

SPLITTING = ("fsdp", "tensor")  # mesh axes that split the matrices of blocks


class WorkSplit(NamedTuple):
    """Mesh axes over which stacked matrices are divided, and their columns."""

    stack: tuple[tuple[str, ...], ...]  # of each stacked dimension
    columns: tuple[str, ...]

    def constrain(self, x: Array, rows: bool = False, columns: bool = False) -> Array:
        """Constrain matrices to their devices: whole, or split by rows or by columns."""
        last = (self.columns if rows else (), self.columns if columns else ())
        return lax.with_sharding_constraint(x, PartitionSpec(*self.stack, *last))


def work_split(shape: tuple[int, ...], stacked: LogicalAxes) -> WorkSplit | None:
    """Return the division of [..., M, N] matrices with M <= N on the ambient mesh; None without.

    The stacked dimensions keep the axes of their logical names. Along other mesh axes, and those
    that divide no dimension, devices compute the same matrices.
    """
    grid = jax.sharding.get_abstract_mesh()
    if grid.empty:
        return None
    sizes = dict(grid.shape)
    stack = [mesh_axes(axis) for axis in stacked]
    columns: tuple[str, ...] = ()
    for axis in SPLITTING:
        for dim, names in enumerate(stack):
            if shape[dim] % math.prod(sizes[name] for name in (*names, axis)) == 0:
                stack[dim] = (*names, axis)
                break
        else:
            ways = math.prod(sizes[name] for name in (*columns, axis))
            if shape[-1] % ways == shape[-2] % ways == 0:
                columns = (*columns, axis)
    return WorkSplit(tuple(stack), columns)
