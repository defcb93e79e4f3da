"""What routed experts cost a device: rows, FLOPs and bytes. Free of JAX."""

import math
from collections.abc import Mapping

from jaxlm.nn.config import MoeConfig
from jaxlm.parallel import logical

# Padded operands that live at once in the backward pass of a layer, as XLA for CPU schedules it
# (scripts/LOG.md): of the width of the stream, and of the experts' hidden units.
PADDED_STREAM, PADDED_HIDDEN = 2, 5


def is_dense(platform: str) -> bool:
    """Return whether XLA computes a ragged product as a dense one on `cpu`, `gpu` or `tpu`.

    Only its compiler for TPUs multiplies each group of rows with its own weight alone. On a CPU and
    on NVIDIA GPUs the rows [M, I] are copied for each of E weights, with zeros for the rows of
    other groups, and [M, E I] is multiplied with [E I, O].
    """
    return platform != "tpu"


def rows(mlp: MoeConfig, length: int, sizes: Mapping[str, int]) -> float:
    """Return the rows that a device's experts are given for each token of its share.

    Of them `top_k` are real. The rest are places that stay empty or, without a capacity on an
    expert axis, room for every token of the axis to choose experts of one device
    (`parallel.expert`).

    Args:
      mlp: the experts of a layer.
      length: tokens of a row that are the device's.
      sizes: of each mesh axis.
    """
    if mlp.capacity is None:
        ways = logical.ways(sizes, "experts")
        return ways * min(mlp.top_k, mlp.experts // ways)
    whole = length * logical.ways(sizes, "length")
    places = math.ceil(mlp.capacity * whole * mlp.top_k / mlp.experts)
    return mlp.experts * min(places, length) / length


def multiple(mlp: MoeConfig, length: int, sizes: Mapping[str, int], *, is_dense: bool) -> float:
    """Return the FLOPs of the routed experts over those that the tokens' own experts need.

    With a capacity it is the capacity. Without one it is 1 for a ragged product, and
    X min(k, H) H / k for a dense one, with H of the experts on each of X devices.
    """
    taken = rows(mlp, length, sizes)
    if mlp.capacity is not None:
        return taken / mlp.top_k
    return taken * held(mlp, sizes) / mlp.top_k if is_dense else 1.0


def held(mlp: MoeConfig, sizes: Mapping[str, int]) -> int:
    """Return the experts of a layer whose weights a device has."""
    return mlp.experts // logical.ways(sizes, "experts")
