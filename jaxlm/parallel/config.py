"""Settings of the device mesh."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Literal

from jaxlm.core.config import setting
from jaxlm.core.errors import ConfigError

AXES = ("data", "fsdp", "tensor")  # outermost first: the slowest wire carries the least

AxisSize = int | Literal["auto"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices lie along each axis. The product is the number of devices; one axis may be `auto`."""

    data: AxisSize = setting(
        "auto", "replicas of the model, each with its own rows of the batch", low=1
    )
    fsdp: AxisSize = setting(1, "devices over which rows and parameters are both split", low=1)
    tensor: AxisSize = setting(
        1, "devices over which heads, hidden units and the vocabulary are split", low=1
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """At most one axis takes what is left over."""
        automatic = [axis for axis in AXES if getattr(self, axis) == "auto"]
        if len(automatic) > 1:
            yield (
                automatic[-1],
                f"only one axis can be auto, and {' and '.join(automatic)} are",
                f"--config.mesh.{automatic[-1]}=1",
            )

    def sizes(self, devices: int) -> dict[str, int]:
        """The size of each axis on `devices` devices, `auto` filled in.

        Raises:
          ConfigError: where the product is not the number of devices; names the nearest sizes that are.
        """
        named = {axis: getattr(self, axis) for axis in AXES}
        fixed = math.prod(size for size in named.values() if size != "auto")
        if "auto" in named.values() and devices % fixed == 0:
            return {
                axis: devices // fixed if size == "auto" else size for axis, size in named.items()
            }
        if fixed == devices:
            return named
        shape = " x ".join(f"{axis}={size}" for axis, size in named.items())
        raise ConfigError(
            f"the mesh does not fit {devices} device{'s' if devices != 1 else ''}",
            where="mesh",
            why=f"{shape} needs {'a multiple of ' if 'auto' in named.values() else ''}{fixed}",
            fix="\n".join(flags(fit) for fit in nearest(named, devices)[:2]),
        )


def factorisations(devices: int) -> list[dict[str, int]]:
    """Every way to lay `devices` out over the axes."""
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    return [
        {"data": devices // (fsdp * tensor), "fsdp": fsdp, "tensor": tensor}
        for fsdp in sizes
        for tensor in sizes
        if devices % (fsdp * tensor) == 0
    ]


def nearest(wanted: Mapping[str, AxisSize], devices: int) -> list[dict[str, int]]:
    """The layouts of `devices`, those first that differ least from `wanted`, by the sum of |log2| of the ratios."""

    def distance(fit: dict[str, int]) -> float:
        return sum(
            abs(math.log2(fit[axis] / size)) for axis, size in wanted.items() if size != "auto"
        )

    return sorted(factorisations(devices), key=distance)


def flags(sizes: Mapping[str, int]) -> str:
    """What to paste for a layout."""
    return " ".join(f"--config.mesh.{axis}={size}" for axis, size in sizes.items())
