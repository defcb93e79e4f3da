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
    MeshConfig,
    format_mesh,
    layout_fixes,
    mesh_error,
    mesh_flags,
    nearest_layouts,
    remaining_fixes,
    slice_crossings,
)


def build(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Return the mesh of all devices (or of `devices`) in the layout of the config.

    Axes are Auto: the compiler propagates shardings from the parameters, the batch, and
    `rules.constrain`. With Explicit axes (`jax.make_mesh`'s default) tracing fails where a batch
    split over ("data", "fsdp") meets an embedding split over "fsdp".

    The outermost axes cross from slice to slice if slow links divide the devices into slices.
    Raises ConfigError if the product of sizes is not the number of devices, or slices do not fit.
    """
    devices = jax.devices() if devices is None else devices
    sizes = config.sizes(len(devices))
    # An axis of 64 on a torus of 16 x 16 takes parts of both dimensions; others stay whole.
    options = dict(allow_split_physical_axes=True)
    if (count := slices(devices)) > 1:
        outer = axis_crossings(sizes, count)
        inner = [sizes[axis] // outer[axis] for axis in AXES]
        across = [outer[axis] for axis in AXES]
        grid = mesh_utils.create_hybrid_device_mesh(inner, across, devices, **options)
    else:
        grid = mesh_utils.create_device_mesh([sizes[axis] for axis in AXES], devices, **options)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def slices(devices: Sequence[jax.Device]) -> int:
    """Return the number of groups with slow links between them: TPU slices, hosts of GPUs."""
    sizes = collections.Counter(getattr(device, "slice_index", 0) for device in devices)
    if len(set(sizes.values())) > 1:
        what = "the slices of this run differ in their number of devices"
        why = ", ".join(f"slice {name}: {count}" for name, count in sorted(sizes.items()))
        raise ConfigError(what, where="mesh", why=why, fix="start it on slices of one size")
    return len(sizes)


def axis_crossings(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Return how often `count` slices cut each axis. ConfigError names the nearest layouts."""
    if (outer := slice_crossings(sizes, count)) is not None:
        return outer

    def line(layout: dict[str, int]) -> str:
        return "" if slice_crossings(layout, count) is None else mesh_flags(layout, sizes)

    fixes = layout_fixes(sizes, nearest_layouts(sizes, math.prod(sizes.values())), line)
    why = "the outermost axes cross from slice to slice: their sizes must divide by that number"
    what, where = f"the mesh does not fit {count} slices", f"mesh {format_mesh(sizes)}"
    raise mesh_error(what, where, [why, *remaining_fixes(fixes)], fixes)
