"""What an optimizer keeps for a parameter, by its shape and logical axes. Free of JAX."""

import math
from types import MappingProxyType
from typing import NamedTuple

from jaxlm.optim.config import (
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    AdamW8bit,
    AmsGrad,
    Lion,
    Momentum,
    Muon,
    Nadam,
    Nesterov,
    Optimizer,
    RmsProp,
    ScheduleFree,
    Sgd,
    Soap,
    Sophia,
)
from jaxlm.parallel.logical import STACKED, LogicalAxes, Sizes, mesh_axes, ways

MOST_SHARDS = 16  # over which a dimension can be split with whole blocks on each device
READ = ("embed", "latent")  # what a block's matrices read, or lead back to; fsdp splits it


class Kept(NamedTuple):
    """An array that lies beside a parameter from step to step."""

    shape: tuple[int, ...]
    axes: LogicalAxes  # what its dimensions are
    part: str = ""  # the end of its path, after the parameter's; nothing where that is all
    item_bytes: int | None = None  # of each number; None is `precision.moments`'s


def moments(
    config: Optimizer, shape: tuple[int, ...], axes: LogicalAxes, mesh: Sizes = MappingProxyType({})
) -> list[Kept]:
    """Return the arrays that the optimizer keeps for a parameter of this shape and these axes, without scalars.

    `mesh` is the size of each mesh axis; an axis that it leaves out has size 1. Shapes are the same on every mesh.
    """
    like = Kept(shape, axes)
    match config:
        case Sgd():
            return []
        case Momentum() | Nesterov() | Adagrad() | RmsProp() | Lion():
            return [like]
        case Adam() | AdamW() | Nadam() | ScheduleFree() | Sophia():
            return [like, like]
        case AmsGrad():
            return [like, like, like]
        case AdamW8bit():
            found = blocks(shape, axes, config.block)
            if found is None:
                return [like, like]
            dim, size = found
            # Few scales on a large mesh: each device has all of them.
            is_split = shape[dim] // size % ways(mesh, axes[dim]) == 0
            scales = Kept(
                tuple(n // size if d == dim else n for d, n in enumerate(shape)),
                tuple(None if d == dim and not is_split else axis for d, axis in enumerate(axes)),
                "scales",
                4,
            )
            return 2 * [Kept(shape, axes, "codes", 1), scales]
        case Muon():
            return [like] if inputs(axes) else [like, like]
        case Soap():
            matrix = sides(shape, axes)
            if matrix is None:
                return [like, like]
            layers, *sizes = matrix
            squares = [
                Kept((*layers, n, n), (*axes[: len(layers)], "basis", None), part, 4)
                for side, n in zip(("left", "right"), sizes, strict=True)
                for part in (side, f"{side}_basis")
                if n <= config.longest
            ]
            return [like, like, *squares]
        case Adafactor():
            pair = factored_dims(shape, axes, config.factor_from)
            if pair is None:
                return [like]
            first, last = pair
            return [_without(like, last, "row"), _without(like, first, "col")]


def factored_dims(
    shape: tuple[int, ...], axes: tuple[str | None, ...], factor_from: int
) -> tuple[int, int] | None:
    """The two largest dimensions, the stack of layers and experts apart, in order; None where they are too small to pay."""
    dims = sorted(
        (d for d, axis in enumerate(axes) if axis not in STACKED), key=lambda d: (shape[d], d)
    )[-2:]
    if len(dims) < 2 or shape[dims[0]] < factor_from:
        return None
    first, last = sorted(dims)
    return first, last


def blocks(
    shape: tuple[int, ...], axes: tuple[str | None, ...], longest: int
) -> tuple[int, int] | None:
    """Return the dimension along which a matrix of a block is cut into blocks, and the block size; None for other leaves.

    The size is the largest divisor of n / 2^k up to `longest`, n being the dimension and 2^k the largest power of two up to
    16 that divides n; k is 0 if no mesh axis splits the dimension. So the shards of 2, 4, 8 or 16 devices hold whole blocks,
    and the size depends on no mesh. Of the dimensions that fsdp does not split, it is the one with the largest blocks. A leaf
    whose blocks would be single numbers has none.
    """
    if not inputs(axes):
        return None

    def size(dim: int) -> int:
        n = shape[dim]
        own = n // math.gcd(n, MOST_SHARDS) if mesh_axes(axes[dim]) else n
        return max(size for size in range(1, min(longest, own) + 1) if own % size == 0)

    whole = [d for d, axis in enumerate(axes) if axis not in (*STACKED, *READ)]
    dim = max(whole, key=lambda d: (size(d), shape[d]))
    return (dim, size(dim)) if size(dim) > 1 else None


def inputs(axes: tuple[str | None, ...]) -> tuple[int, ...]:
    """The input dimensions of a leaf that is a matrix of a block; none for other leaves.

    A block's matrices lead from the residual stream, `embed`, or to it, or from a latent to heads.
    """
    own = [dim for dim, axis in enumerate(axes) if axis not in STACKED]
    read = [dim for dim, axis in enumerate(axes) if axis in READ]
    if not read or len(own) < 2 or {"vocab", "positions"} & set(axes):
        return ()
    (stream,) = read
    return (stream,) if stream == own[0] else tuple(dim for dim in own if dim != stream)


def sides(
    shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> tuple[tuple[int, ...], int, int] | None:
    """Of a leaf that is a matrix of a block: its stacked dimensions, inputs and outputs; None for other leaves."""
    if not inputs(axes):
        return None
    stacked = sum(axis in STACKED for axis in axes)
    ins = math.prod(shape[dim] for dim in inputs(axes))
    return shape[:stacked], ins, math.prod(shape[stacked:]) // ins


def _without(whole: Kept, gone: int, part: str) -> Kept:
    kept = [d for d in range(len(whole.shape)) if d != gone]
    return Kept(tuple(whole.shape[d] for d in kept), tuple(whole.axes[d] for d in kept), part)
