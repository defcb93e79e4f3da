"""Arrays that an optimizer keeps for a parameter, by its shape and logical axes. Free of JAX."""

import math
from types import MappingProxyType
from typing import NamedTuple

from jaxlm.parallel.logical import STACKED, LogicalAxes, Sizes, mesh_axes, ways

Shape = tuple[int, ...]
ONE_DEVICE: Sizes = MappingProxyType({})  # a mesh whose axes all have size 1
MAX_SHARDS = 16  # of a dimension, for which each device holds whole blocks
READ = ("embed", "latent")  # inputs or outputs of a block's matrices; fsdp splits them


class StateArray(NamedTuple):
    """An array of the optimizer's state that belongs to a parameter."""

    shape: Shape
    axes: LogicalAxes
    part: str = ""  # end of its path after that of the parameter
    item_bytes: int | None = None  # of each number; None for those of `precision.moments`


def full(count: int, shape: Shape, axes: LogicalAxes) -> list[StateArray]:
    """Return `count` arrays of the shape of the parameter."""
    return count * [StateArray(shape, axes)]


def block_moments(shape: Shape, axes: LogicalAxes, block: int, mesh: Sizes) -> list[StateArray]:
    """Return two moments in blocks of 8-bit codes with a float32 scale each, see `adam_8bit`."""
    divided = blocks(shape, axes, block)
    if divided is None:
        return full(2, shape, axes)
    dim, size = divided
    # Few scales on a large mesh: each device has all of them.
    is_split = shape[dim] // size % ways(mesh, axes[dim]) == 0
    counts = tuple(n // size if d == dim else n for d, n in enumerate(shape))
    names = tuple(None if d == dim and not is_split else axis for d, axis in enumerate(axes))
    return 2 * [StateArray(shape, axes, "codes", 1), StateArray(counts, names, "scales", 4)]


def basis_moments(shape: Shape, axes: LogicalAxes, max_dim: int) -> list[StateArray]:
    """Return two moments, and for a block's matrix the squares of its sides, see `soap`."""
    matrix = sides(shape, axes)
    if matrix is None:
        return full(2, shape, axes)
    layers, *sizes = matrix
    squares = [
        StateArray((*layers, n, n), (*axes[: len(layers)], "basis", None), part, 4)
        for side, n in zip(("left", "right"), sizes, strict=True)
        for part in (side, f"{side}_basis")
        if n <= max_dim
    ]
    return [*full(2, shape, axes), *squares]


def factored_moments(shape: Shape, axes: LogicalAxes, factor_from: int) -> list[StateArray]:
    """Return a second moment as a row and a column, see `adafactor`."""
    pair = factored_dims(shape, axes, factor_from)
    if pair is None:
        return full(1, shape, axes)

    def without(dim: int, part: str) -> StateArray:
        rest = [d for d in range(len(shape)) if d != dim]
        return StateArray(tuple(shape[d] for d in rest), tuple(axes[d] for d in rest), part)

    first, last = pair
    return [without(last, "row"), without(first, "col")]


def factored_dims(shape: Shape, axes: LogicalAxes, factor_from: int) -> tuple[int, int] | None:
    """Return the two largest dimensions that are not stacked, in order; None if they are small."""
    unstacked = (d for d, axis in enumerate(axes) if axis not in STACKED)
    dims = sorted(unstacked, key=lambda d: (shape[d], d))[-2:]
    if len(dims) < 2 or shape[dims[0]] < factor_from:
        return None
    first, last = sorted(dims)
    return first, last


def blocks(shape: Shape, axes: LogicalAxes, max_size: int) -> tuple[int, int] | None:
    """Return the dimension along which a block's matrix is divided, and the size of the parts.

    None for leaves that are no matrix of a block, and if the parts would be single numbers. The
    size is the largest divisor of n / 2^k up to `max_size`, n being the dimension and 2^k the
    largest power of two up to 16 that divides n; k is 0 if no mesh axis splits the dimension. So
    the shards of 2, 4, 8 or 16 devices hold whole parts, and the size depends on no mesh. Of the
    dimensions that fsdp does not split, it is the one with the largest parts.
    """
    if not inputs(axes):
        return None

    def size(dim: int) -> int:
        n = shape[dim]
        shard = n // math.gcd(n, MAX_SHARDS) if mesh_axes(axes[dim]) else n
        return max(size for size in range(1, min(max_size, shard) + 1) if shard % size == 0)

    whole = [d for d, axis in enumerate(axes) if axis not in (*STACKED, *READ)]
    dim = max(whole, key=lambda d: (size(d), shape[d]))
    return (dim, size(dim)) if size(dim) > 1 else None


def inputs(axes: LogicalAxes) -> tuple[int, ...]:
    """Return the input dimensions of a leaf that is a matrix of a block; empty for other leaves.

    A block's matrices read the residual stream, `embed`, or write to it, or read a latent.
    """
    dims = [dim for dim, axis in enumerate(axes) if axis not in STACKED]
    read = [dim for dim, axis in enumerate(axes) if axis in READ]
    if not read or len(dims) < 2 or {"vocab", "positions"} & set(axes):
        return ()
    (stream,) = read
    return (stream,) if stream == dims[0] else tuple(dim for dim in dims if dim != stream)


def sides(shape: Shape, axes: LogicalAxes) -> tuple[Shape, int, int] | None:
    """Return the stacked dimensions, inputs and outputs of a block's matrix; None for others."""
    if not inputs(axes):
        return None
    stacked = sum(axis in STACKED for axis in axes)
    ins = math.prod(shape[dim] for dim in inputs(axes))
    return shape[:stacked], ins, math.prod(shape[stacked:]) // ins
