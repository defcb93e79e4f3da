"""The device mesh."""

import jax
from jax.sharding import AxisType, Mesh

from jaxlm.parallel.config import AXES, MeshConfig


def build(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh of all devices (or of `devices`), laid out as the config says.

    Axes are Auto: the compiler propagates shardings from the parameters, the batch, and `rules.constrain`.
    With Explicit axes (`jax.make_mesh`'s default) a batch split over ("data", "fsdp") that meets an embedding
    split over "fsdp" is refused at trace time.

    Raises:
      ConfigError: where the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = config.sizes(len(devices))
    shape = tuple(sizes[axis] for axis in AXES)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
