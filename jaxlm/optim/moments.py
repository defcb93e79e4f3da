"""What an optimizer keeps for a parameter, by its shape and logical axes. Free of JAX."""

from jaxlm.optim.config import Adafactor, AdamW, Lion, Muon, Optimizer
from jaxlm.parallel.logical import STACKED, LogicalAxes

Placed = tuple[tuple[int, ...], LogicalAxes]  # a shape, and what its dimensions are


def moments(config: Optimizer, shape: tuple[int, ...], axes: LogicalAxes) -> list[Placed]:
    """The arrays that lie beside a parameter from step to step, in its dtype; scalars are left out."""
    match config:
        case AdamW():
            return [(shape, axes), (shape, axes)]
        case Lion():
            return [(shape, axes)]
        case Muon():
            return [(shape, axes)] if inputs(axes) else [(shape, axes), (shape, axes)]
        case Adafactor():
            pair = factored_dims(shape, axes, config.factor_from)
            return [(shape, axes)] if pair is None else [_without(shape, axes, d) for d in pair]


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


def inputs(axes: tuple[str | None, ...]) -> tuple[int, ...]:
    """The input dimensions of a leaf that is a matrix of a block; none for other leaves.

    A block's matrices lead from the residual stream, `embed`, or to it.
    """
    own = [dim for dim, axis in enumerate(axes) if axis not in STACKED]
    if "embed" not in axes or len(own) < 2 or {"vocab", "positions"} & set(axes):
        return ()
    stream = axes.index("embed")
    return (stream,) if stream == own[0] else tuple(dim for dim in own if dim != stream)


def _without(shape: tuple[int, ...], axes: LogicalAxes, gone: int) -> Placed:
    kept = [d for d in range(len(shape)) if d != gone]
    return tuple(shape[d] for d in kept), tuple(axes[d] for d in kept)
