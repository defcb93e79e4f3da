"""What accelerators can do at most, and machines made of them, by name. Free of JAX."""

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from jaxlm.core.errors import CommandError
from jaxlm.core.spelling import nearest

Dtype = Literal["float32", "bfloat16", "float16", "int8", "fp8"]
GIB, GB = 2**30, 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One device as JAX counts them. `flops` are dense products a second by the dtype of their operands."""

    name: str
    kinds: tuple[str, ...]  # what JAX calls it, exactly; a slice of a chip (MIG) has another name
    flops: Mapping[Dtype, float]
    memory_bytes: int
    memory_speed: float  # bytes a second
    link_speed: float  # bytes a second that a device sends to its neighbours on the fast wire, all links together
    source: str

    @property
    def is_tpu(self) -> bool:
        """Whether it is a TPU, whose memory is all for programs, and whose slices have a shape."""
        return self.name.startswith("v")


def _chip(
    name: str,
    kinds: tuple[str, ...],
    *,
    low: tuple[float | None, float | None],
    single: float,
    eight: tuple[float | None, float | None] = (None, None),
    memory: int,
    speed: float,
    link: float,
    source: str,
) -> Chip:
    """Teraflops of (bfloat16, float16), of float32, and of (int8, fp8); None where there is no such unit."""
    given = dict(zip(("bfloat16", "float16", "int8", "fp8"), (*low, *eight), strict=True))
    flops = {dtype: 1e12 * peak for dtype, peak in given.items() if peak is not None}
    flops["float32"] = 1e12 * single
    return Chip(
        name=name,
        kinds=kinds,
        flops=MappingProxyType(flops),  # type: ignore[arg-type]
        memory_bytes=memory,
        memory_speed=GB * speed,
        link_speed=GB * link,
        source=source,
    )


_TPU = "cloud.google.com/tpu/docs, system architecture of each generation"

# NVIDIA's datasheets quote twice these products, with sparsity, and links in both directions together. Products of
# float32 are those that XLA makes of them by default: TF32 where a GPU has it, one pass of bfloat16 on a TPU.
CHIPS = {
    chip.name: chip
    for chip in (
        _chip(
            "v5e",
            ("TPU v5 lite", "TPU v5e"),
            low=(197, None),
            single=197,
            eight=(394, None),
            memory=16 * GIB,
            speed=819,
            link=200,
            source=_TPU,
        ),
        _chip(
            "v5p",
            ("TPU v5", "TPU v5p"),
            low=(459, None),
            single=459,
            eight=(918, None),
            memory=95 * GIB,
            speed=2765,
            link=600,
            source=_TPU,
        ),
        _chip(
            "v6e",
            ("TPU v6 lite", "TPU v6e"),
            low=(918, None),
            single=918,
            eight=(1836, None),
            memory=32 * GIB,
            speed=1638,
            link=400,
            source=_TPU,
        ),
        _chip(
            "v4",
            ("TPU v4",),
            low=(275, None),
            single=275,
            eight=(275, None),
            memory=32 * GIB,
            speed=1228,
            link=300,
            source=_TPU,
        ),
        _chip(
            "v3",
            ("TPU v3",),
            low=(61.5, None),
            single=61.5,
            memory=16 * GIB,
            speed=450,
            link=140,
            source=f"{_TPU}; a device is half a chip",
        ),
        _chip(
            "v2",
            ("TPU v2",),
            low=(22.5, None),
            single=22.5,
            memory=8 * GIB,
            speed=350,
            link=62,
            source=f"{_TPU}; a device is half a chip",
        ),
        _chip(
            "b200",
            ("NVIDIA B200",),
            low=(2250, 2250),
            single=1125,
            eight=(4500, 4500),
            memory=180 * GB,
            speed=8000,
            link=900,
            source="NVIDIA DGX B200 datasheet",
        ),
        _chip(
            "h200",
            ("NVIDIA H200",),
            low=(989.4, 989.4),
            single=494.7,
            eight=(1978.9, 1978.9),
            memory=141 * GB,
            speed=4800,
            link=450,
            source="NVIDIA H200 datasheet",
        ),
        _chip(
            "h100",
            ("NVIDIA H100 80GB HBM3",),
            low=(989.4, 989.4),
            single=494.7,
            eight=(1978.9, 1978.9),
            memory=80 * GB,
            speed=3350,
            link=450,
            source="NVIDIA H100 datasheet",
        ),
        _chip(
            "h100-pcie",
            ("NVIDIA H100 PCIe",),
            low=(756, 756),
            single=378,
            eight=(1513, 1513),
            memory=80 * GB,
            speed=2000,
            link=64,
            source="NVIDIA H100 datasheet; linked by PCIe",
        ),
        _chip(
            "h100-nvl",
            ("NVIDIA H100 NVL", "NVIDIA H200 NVL"),
            low=(835.5, 835.5),
            single=417.8,
            eight=(1671, 1671),
            memory=94 * GB,
            speed=3900,
            link=300,
            source="NVIDIA H100 and H200 NVL datasheets, memory of the H100",
        ),
        _chip(
            "gh200",
            ("NVIDIA GH200 480GB",),
            low=(989.4, 989.4),
            single=494.7,
            eight=(1978.9, 1978.9),
            memory=96 * GB,
            speed=4000,
            link=450,
            source="NVIDIA GH200 datasheet",
        ),
        _chip(
            "a100",
            ("NVIDIA A100-SXM4-80GB",),
            low=(312, 312),
            single=156,
            eight=(624, None),
            memory=80 * GB,
            speed=2039,
            link=300,
            source="NVIDIA A100 datasheet",
        ),
        _chip(
            "a100-40",
            ("NVIDIA A100-SXM4-40GB",),
            low=(312, 312),
            single=156,
            eight=(624, None),
            memory=40 * GB,
            speed=1555,
            link=300,
            source="NVIDIA A100 datasheet",
        ),
        _chip(
            "a100-pcie",
            ("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"),
            low=(312, 312),
            single=156,
            eight=(624, None),
            memory=40 * GB,
            speed=1555,
            link=32,
            source="NVIDIA A100 datasheet, memory of the smaller; linked by PCIe",
        ),
        _chip(
            "l40s",
            ("NVIDIA L40S",),
            low=(362, 362),
            single=183,
            eight=(733, 733),
            memory=48 * GB,
            speed=864,
            link=32,
            source="NVIDIA L40S datasheet; linked by PCIe",
        ),
        _chip(
            "l4",
            ("NVIDIA L4",),
            low=(121, 121),
            single=60,
            eight=(242, 242),
            memory=24 * GB,
            speed=300,
            link=32,
            source="NVIDIA L4 datasheet; linked by PCIe",
        ),
        _chip(
            "v100",
            ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"),
            low=(None, 125),
            single=15.7,
            memory=16 * GB,
            speed=900,
            link=150,
            source="NVIDIA V100 datasheet, memory of the smaller",
        ),
        _chip(
            "t4",
            ("Tesla T4",),
            low=(None, 65),
            single=8.1,
            eight=(130, None),
            memory=16 * GB,
            speed=320,
            link=16,
            source="NVIDIA T4 datasheet; linked by PCIe",
        ),
    )
}
_OF_KIND = {kind: chip for chip in CHIPS.values() for kind in chip.kinds}


def of_kind(device_kind: str) -> Chip | None:
    """The chip that JAX calls so; None where the table has none."""
    return _OF_KIND.get(device_kind)


def peak_flops(device_kind: str, devices: int = 1) -> float | None:
    """The peak of so many devices in bfloat16, or float16 where they have no bfloat16; None where it is unknown, which a CPU's always is."""
    chip = of_kind(device_kind)
    if chip is None:
        return None
    return devices * chip.flops.get("bfloat16", chip.flops.get("float16", 0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices that are joined by fast wires. `topology` is what the TPU compiler calls a slice."""

    name: str
    chip: Chip
    devices: int
    topology: str | None = None


# cloud.google.com/tpu/docs: v5p counts cores, two a chip; the others count chips.
_GRIDS = ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8))
SLICES = {
    machine.name: machine
    for machine in (
        *(
            Machine(
                name=f"{chip}-{x * y}",
                chip=CHIPS[chip],
                devices=x * y,
                topology=f"{chip}:{x}x{y}",
            )
            for chip in ("v5e", "v6e")
            for x, y in _GRIDS
        ),
        *(
            Machine(
                name=f"v5p-{2 * x * y * z}",
                chip=CHIPS["v5p"],
                devices=x * y * z,
                topology=f"v5p:{x}x{y}x{z}",
            )
            for x, y, z in _CUBES
        ),
    )
}


def machine(name: str, *, flag: str) -> Machine:
    """`v5e-16`, `h200` or `h100x8`: a TPU slice, a chip, or several of one host. `flag` is where the name was given.

    Raises:
      CommandError: for another name, with the nearest that there is.
    """
    if name in SLICES:
        return SLICES[name]
    found = re.fullmatch(r"(.+?)(?:x([1-9][0-9]{0,4}))?", name)
    chip = CHIPS.get(found[1]) if found else None
    if found and chip and not (chip.is_tpu and found[2]):
        return Machine(name=name, chip=chip, devices=int(found[2] or 1))
    known = [*SLICES, *CHIPS, *(f"{each}x8" for each in CHIPS if not CHIPS[each].is_tpu)]
    meant = nearest(name, known) or "h100x8"
    raise CommandError(
        f"there is no machine {name!r} in the table",
        where=f"{flag}={name}",
        why=f"chips are {', '.join(CHIPS)}, as in {next(iter(reversed(CHIPS)))} or h100x8; slices of TPUs are as v5e-16, v5p-128, v6e-256",
        fix=f"{flag}={meant}",
    )
