"""The device mesh."""

import collections
import math
from collections.abc import Mapping, Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxlm.core.errors import ConfigError
from jaxlm.parallel.config import (
    AXES,
    OFFERED,
    MeshConfig,
    beyond,
    crossings,
    flags,
    nearest,
    offered,
    shown,
)


def build(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh of all devices (or of `devices`), laid out as the config says.

    Axes are Auto: the compiler propagates shardings from the parameters, the batch, and `rules.constrain`.
    With Explicit axes (`jax.make_mesh`'s default) a batch split over ("data", "fsdp") that meets an embedding
    split over "fsdp" is refused at trace time.

    Where devices lie in several slices, with slow wires between them, the outermost axes cross from one to another.

    Raises:
      ConfigError: where the sizes do not multiply to the number of devices, or cannot be cut into its slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = config.sizes(len(devices))
    types = (AxisType.Auto,) * len(AXES)
    # An axis of 64 on a torus of 16 x 16 takes parts of both of its dimensions; where none need be cut, none is.
    if (count := slices(devices)) > 1:
        outer = across(sizes, count)
        grid = mesh_utils.create_hybrid_device_mesh(
            [sizes[axis] // outer[axis] for axis in AXES],
            [outer[axis] for axis in AXES],
            devices,
            allow_split_physical_axes=True,
        )
    else:
        grid = mesh_utils.create_device_mesh(
            [sizes[axis] for axis in AXES], devices, allow_split_physical_axes=True
        )
    return Mesh(grid, AXES, axis_types=types)


def slices(devices: Sequence[jax.Device]) -> int:
    """How many groups of devices there are with slow wires between them: TPU slices, hosts of GPUs.

    Raises:
      ConfigError: where one has more devices than another.
    """
    held = collections.Counter(getattr(device, "slice_index", 0) for device in devices)
    if len(set(held.values())) > 1:
        raise ConfigError(
            "the slices of this run do not have the same number of devices",
            where="mesh",
            why=", ".join(f"slice {name}: {count}" for name, count in sorted(held.items())),
            fix="start it on slices of one size",
        )
    return len(held)


def across(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """How often each axis is cut by the borders of `count` slices.

    Raises:
      ConfigError: where the axes cannot be cut so; names the nearest layouts that can.
    """
    if (outer := crossings(sizes, count)) is not None:
        return outer
    layouts = nearest(sizes, math.prod(sizes.values()))
    fixes = offered(
        sizes, layouts, lambda fit: flags(fit, sizes) if crossings(fit, count) is not None else ""
    )
    why = "the outermost axes cross from slice to slice, and their sizes must divide by the number of slices"
    raise ConfigError(
        f"the mesh does not fit {count} slices",
        where=f"mesh {shown(sizes)}",
        why="\n".join([why, *beyond(fixes)]),
        fix="\n".join(fixes[:OFFERED]),
    )
