"""Parameters that know the names of their axes."""

from flax import nnx
from jax import Array

LOGICAL_AXES = "logical_axes"


def parameter(value: Array, *axes: str) -> nnx.Param:
    """A parameter whose dimensions carry logical axis names, for `parallel.rules`.

    The names are kept under our own key: Flax shards eagerly by its own `sharding_names`, which needs a mesh to build.
    """
    if len(axes) != value.ndim:
        raise ValueError(f"{len(axes)} axis names for shape {value.shape}")
    return nnx.Param(value, logical_axes=axes)  # type: ignore[call-arg]
