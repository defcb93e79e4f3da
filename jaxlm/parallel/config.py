"""Settings of the device mesh."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from jaxlm.core.config import setting
from jaxlm.core.errors import ConfigError

# Outermost first: the slowest wire carries the least.
AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")

OFFERED = 4  # layouts to paste at most, as an error has eight lines; one names the others

AxisSize = int | Literal["auto"]
ContextKeys = Literal["auto", "gather", "ring"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices lie along each axis. The product is the number of devices; one axis may be `auto`."""

    pipe: AxisSize = setting(1, "stages, each with its own layers", low=1)
    data: AxisSize = setting(
        "auto", "replicas of the model, each with its own rows of the batch", low=1
    )
    fsdp: AxisSize = setting(1, "devices over which rows and parameters are both split", low=1)
    expert: AxisSize = setting(1, "devices over which rows and experts are both split", low=1)
    context: AxisSize = setting(1, "devices over which the tokens of a row are split", low=1)
    tensor: AxisSize = setting(
        1, "devices over which heads, hidden units and the vocabulary are split", low=1
    )
    zero: int = setting(
        3,
        "what fsdp splits beside rows: 1 the state of the optimizer, 2 gradients too, 3 parameters too (ZeRO, arXiv:1910.02054)",
        low=1,
        high=3,
    )

    context_keys: ContextKeys = setting(
        "auto",
        "how queries reach keys on other devices of context: gather them, pass them round in a ring, or auto, by bytes",
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
        shape = " x ".join(f"{axis}={size}" for axis, size in named.items() if size != 1)
        needed = f"{shape} needs {'a multiple of ' if 'auto' in named.values() else ''}{fixed}"
        fixes = offered(named, nearest(named, devices), lambda fit: flags(fit, named))
        raise ConfigError(
            f"the mesh does not fit {devices} device{'s' if devices != 1 else ''}",
            where="mesh",
            why="\n".join([needed, *beyond(fixes)]),
            fix="\n".join(fixes[:OFFERED]),
        )


def factorisations(devices: int, axes: Sequence[str] = AXES) -> list[dict[str, int]]:
    """Every way to lay `devices` out over some axes; the others have size 1."""
    first, *rest = axes
    if not rest:
        return [dict.fromkeys(AXES, 1) | {first: devices}]
    return [
        fit | {first: size}
        for size in range(1, devices + 1)
        if devices % size == 0
        for fit in factorisations(devices // size, rest)
    ]


def nearest(wanted: Mapping[str, AxisSize], devices: int) -> list[dict[str, int]]:
    """The layouts of `devices`, those first that differ least from `wanted`, by the sum of |log2| of the ratios,
    and among equals by the largest.

    They use the axes that `wanted` uses, and those that suit every model.
    """
    used = [axis for axis in AXES if wanted.get(axis, 1) != 1 or axis in ("data", "fsdp", "tensor")]
    return sorted(factorisations(devices, used), key=functools.partial(_distance, wanted))


def offered(
    wanted: Mapping[str, AxisSize],
    layouts: Iterable[dict[str, int]],
    line: Callable[[dict[str, int]], str],
) -> list[str]:
    """What to paste for some of these layouts, which come nearest to `wanted` first; `line` is empty for one that will not do.

    All that are as near as the nearest are among them; where that is a single one, so are all that come next.
    """
    found: list[str] = []
    for _, alike in itertools.groupby(layouts, key=functools.partial(_distance, wanted)):
        found += filter(None, map(line, alike))
        if len(found) > 1:
            break
    return found


def beyond(fixes: list[str]) -> list[str]:
    """A line that names those of the layouts found by `offered` that are too many to paste; none where all are pasted."""
    rest = [fix.replace("--config.mesh.", "") for fix in fixes[OFFERED:]]
    return [f"as near as the last mesh below: {', '.join(rest)}"] if rest else []


def _distance(wanted: Mapping[str, AxisSize], fit: Mapping[str, int]) -> tuple[float, float]:
    changes = [abs(math.log2(fit[axis] / size)) for axis, size in wanted.items() if size != "auto"]
    return round(sum(changes), 9), round(max(changes, default=0), 9)


def crossings(sizes: Mapping[str, int], slices: int) -> dict[str, int] | None:
    """How often each axis is cut by the borders of `slices` slices: the outermost ones, each wholly before the next.

    Only so do the rows of a slice lie beside each other in the batch. None where the axes cannot be cut so.
    """
    outer = {}
    for axis in AXES:
        outer[axis] = math.gcd(slices, sizes[axis])
        slices //= outer[axis]
        if slices > 1 and outer[axis] < sizes[axis]:
            return None
    return outer


def flags(sizes: Mapping[str, int], instead_of: Mapping[str, AxisSize]) -> str:
    """What to paste for a layout instead of another."""
    return " ".join(
        f"--config.mesh.{axis}={size}"
        for axis, size in sizes.items()
        if instead_of.get(axis, 1) not in (size, "auto")
    )


def shown(sizes: Mapping[str, int]) -> str:
    """A layout in words: the axes that split anything."""
    split = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    return " x ".join(split) or "of one device"
