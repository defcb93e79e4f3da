"""The one table of logical axes and the mesh axes that split them. Free of JAX."""

import math
from collections.abc import Mapping

LogicalAxes = tuple[str | None, ...]
Sizes = Mapping[str, int]  # of each mesh axis

# Complete, without a default, so that every new axis needs a decision.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp", "expert"),
    "length": "context",
    "layers": "pipe",
    "prefix": None,  # layers before the repeating ones, outside of the pipeline
    "stages": "pipe",  # parts of a micro-batched activation, one for each stage
    "experts": "expert",
    "routes": None,  # a router's scores, one for each expert
    "balance": None,  # bias of these scores, which balances the choice
    "embed": "fsdp",
    "vocab": ("pipe", "tensor"),  # stages unembed the same rows, each in a part of the vocabulary
    "joined": None,  # stream and target embedding concatenated: tensor would gather both backward
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "head_dim": None,
    "rank": None,  # shared by all heads: latents of queries, of keys and values; a rotated key
    "latent": "fsdp",  # the same, as the input of the heads' projections
    "blocks": None,  # scales of a quantized weight, of blocks along its inputs
    "features": None,  # outputs of the dense layer in an encoder's head, stream width to itself
    "positions": None,
    "basis": "fsdp",  # rows of the square matrices of an optimizer for a side of a matrix
}

LAYERS = ("layers", "prefix")  # axes along which layers are stacked
STACKED = (*LAYERS, "experts")  # axes along which matrices are stacked


def mesh_axes(axis: str | None) -> tuple[str, ...]:
    """Return the mesh axes that split a logical axis. Raises KeyError for one without a rule."""
    names = None if axis is None else RULES[axis]
    return (names,) if isinstance(names, str) else names or ()


def ways(sizes: Sizes, axis: str | None) -> int:
    """Return the number of parts of a logical axis on a mesh of these sizes."""
    return math.prod(sizes.get(name, 1) for name in mesh_axes(axis))
