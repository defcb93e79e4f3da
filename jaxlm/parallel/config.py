"""Settings of the device mesh."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from jaxlm.core.config import setting
from jaxlm.core.errors import ConfigError
from jaxlm.core.nearest import divisors

# Outermost first: the slowest link carries the least traffic.
AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
MAX_FIXES = 4  # layouts to paste, as an error has eight lines; one of them names the others

AxisSize = int | Literal["auto"]
ContextKeys = Literal["auto", "gather", "ring"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices along each axis; their product is all devices. One axis may be `auto`."""

    pipe: AxisSize = setting(1, "pipeline stages, each with its own layers", low=1)
    data: AxisSize = setting(
        "auto", "replicas of the model, each with its own rows of the batch", low=1
    )
    fsdp: AxisSize = setting(1, "devices that split both rows and parameters", low=1)
    expert: AxisSize = setting(1, "devices that split both rows and experts", low=1)
    context: AxisSize = setting(1, "devices that split the tokens of a row", low=1)
    tensor: AxisSize = setting(1, "devices that split heads, hidden size and vocabulary", low=1)
    zero: int = setting(
        3,
        "arrays that fsdp splits besides rows: 1 optimizer state, 2 gradients too, 3 parameters"
        " too (ZeRO, arXiv:1910.02054)",
        low=1,
        high=3,
    )
    context_keys: ContextKeys = setting(
        "auto",
        "transport of keys to queries on other devices of context: gather, ring, or auto, by bytes",
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Report more than one automatic axis."""
        automatic = [axis for axis in AXES if getattr(self, axis) == "auto"]
        if len(automatic) > 1:
            why = f"only one axis can be auto, and {' and '.join(automatic)} are"
            yield automatic[-1], why, f"--config.mesh.{automatic[-1]}=1"

    def sizes(self, devices: int) -> dict[str, int]:
        """Return the size of each axis, `auto` filled in. ConfigError names the nearest sizes."""
        named = {axis: getattr(self, axis) for axis in AXES}
        fixed = math.prod(size for size in named.values() if size != "auto")
        if fixed == devices or ("auto" in named.values() and devices % fixed == 0):
            rest = devices // fixed
            return {axis: rest if size == "auto" else size for axis, size in named.items()}
        shape = " x ".join(f"{axis}={size}" for axis, size in named.items() if size != 1)
        needed = f"{shape} needs {'a multiple of ' if 'auto' in named.values() else ''}{fixed}"
        layouts = nearest_layouts(named, devices)
        fixes = layout_fixes(named, layouts, lambda layout: mesh_flags(layout, named))
        what = f"the mesh does not fit {devices} device{'s' if devices != 1 else ''}"
        raise mesh_error(what, "mesh", [needed, *remaining_fixes(fixes)], fixes)


def factorizations(devices: int, axes: Sequence[str] = AXES) -> list[dict[str, int]]:
    """Return every layout of `devices` over some axes; the others have size 1."""
    first, *rest = axes
    if not rest:
        return [dict.fromkeys(AXES, 1) | {first: devices}]
    parts = ((size, factorizations(devices // size, rest)) for size in divisors(devices))
    return [layout | {first: size} for size, layouts in parts for layout in layouts]


def nearest_layouts(target: Mapping[str, AxisSize], devices: int) -> list[dict[str, int]]:
    """Return the layouts of `devices`, those first that differ least from `target`.

    The difference is the sum of |log2| of the ratios, and for equal sums the largest. Layouts use
    the axes of `target` and those that suit every model.
    """
    used = [axis for axis in AXES if target.get(axis, 1) != 1 or axis in ("data", "fsdp", "tensor")]
    return sorted(factorizations(devices, used), key=functools.partial(_distance, target))


def layout_fixes(
    target: Mapping[str, AxisSize],
    layouts: Iterable[dict[str, int]],
    line: Callable[[dict[str, int]], str],
) -> list[str]:
    """Return fix lines for the layouts nearest to `target`, which are sorted by distance.

    `line` returns an empty text for an unsuitable layout. All layouts at the smallest distance are
    included; if that is only one, so are all at the next.
    """
    fixes: list[str] = []
    for _, equals in itertools.groupby(layouts, key=functools.partial(_distance, target)):
        fixes += filter(None, map(line, equals))
        if len(fixes) > 1:
            break
    return fixes


def mesh_error(what: str, where: str, why: list[str], fixes: list[str]) -> ConfigError:
    """Return the error of a mesh, with the first `MAX_FIXES` of its `layout_fixes`."""
    shown = fixes[:MAX_FIXES]
    return ConfigError(what, where=where, why="\n".join(why), fix="\n".join(shown))


def remaining_fixes(fixes: list[str]) -> list[str]:
    """Return a line that names the `layout_fixes` beyond `MAX_FIXES`; empty without any."""
    rest = [fix.replace("--config.mesh.", "") for fix in fixes[MAX_FIXES:]]
    return [f"as near as the last mesh below: {', '.join(rest)}"] if rest else []


def _distance(target: Mapping[str, AxisSize], layout: Mapping[str, int]) -> tuple[float, float]:
    fixed = {axis: size for axis, size in target.items() if size != "auto"}
    changes = [abs(math.log2(layout[axis] / size)) for axis, size in fixed.items()]
    return round(sum(changes), 9), round(max(changes, default=0), 9)


def slice_crossings(sizes: Mapping[str, int], slices: int) -> dict[str, int] | None:
    """Return how often the borders of `slices` slices cut each axis, the outermost axes first.

    Only then are the rows of a slice adjacent in the batch. None if the axes cannot be cut so.
    """
    outer = {}
    for axis in AXES:
        outer[axis] = math.gcd(slices, sizes[axis])
        slices //= outer[axis]
        if slices > 1 and outer[axis] < sizes[axis]:
            return None
    return outer


def mesh_flags(sizes: Mapping[str, int], instead_of: Mapping[str, AxisSize]) -> str:
    """Return the flags that change one layout into another."""
    changed = [axis for axis in sizes if instead_of.get(axis, 1) not in (sizes[axis], "auto")]
    return " ".join(f"--config.mesh.{axis}={sizes[axis]}" for axis in changed)


def format_mesh(sizes: Mapping[str, int]) -> str:
    """Return the axes of a layout that split anything, in words."""
    split = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    return " x ".join(split) or "of one device"
