"""Rows, FLOPs and bytes of routed experts on a device. Free of JAX."""

import math
from collections.abc import Mapping

from jaxlm.nn.config import MoeConfig
from jaxlm.parallel import logical

# Padded operands alive at once in the backward pass of a layer, as XLA for CPU schedules it
# (scripts/LOG.md): of the stream's width, and of the experts' hidden units.
PADDED_STREAM, PADDED_HIDDEN = 2, 5


def is_dense(platform: str) -> bool:
    """Return whether XLA computes a ragged product as a dense one on `cpu`, `gpu` or `tpu`.

    On TPUs each group of rows is multiplied with its own weight. On CPUs and NVIDIA GPUs the rows
    [M, I] are copied for each of E weights, with zeros for other groups' rows, and [M, E I] is
    multiplied with [E I, O].
    """
    return platform != "tpu"


def rows(mlp: MoeConfig, length: int, sizes: Mapping[str, int]) -> float:
    """Return the rows that a device's experts compute for each of its tokens.

    `top_k` of them are real. The others are empty slots or, without a capacity on an expert axis,
    room for every token of the axis to choose experts of one device (`parallel.expert`). The device
    has `length` tokens of a row; `sizes` are those of the mesh axes.
    """
    if mlp.capacity is None:
        ways = logical.ways(sizes, "experts")
        return ways * min(mlp.top_k, mlp.experts // ways)
    whole = length * logical.ways(sizes, "length")
    places = math.ceil(mlp.capacity * whole * mlp.top_k / mlp.experts)
    return mlp.experts * min(places, length) / length


def multiple(mlp: MoeConfig, length: int, sizes: Mapping[str, int], *, is_dense: bool) -> float:
    """Return the FLOPs of routed experts over those of each token's top_k experts.

    With a capacity this is the capacity. Without one it is 1 for a ragged product, and
    X min(k, H) H / k for a dense one, with H of the experts on each of X devices.
    """
    computed = rows(mlp, length, sizes)
    if mlp.capacity is not None:
        return computed / mlp.top_k
    return computed * held(mlp, sizes) / mlp.top_k if is_dense else 1.0


def held(mlp: MoeConfig, sizes: Mapping[str, int]) -> int:
    """Return the number of a layer's experts whose weights a device holds."""
    return mlp.experts // logical.ways(sizes, "experts")
