"""What accelerators can do at most, and machines made of them, by name. Free of JAX."""

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

from jaxlm.core.errors import CommandError

Dtype = Literal["bfloat16", "float16", "float32", "int8", "fp8"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
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
    capability: float | None = None  # what CUDA calls the compute capability
    is_known: bool = True  # False: only `memory_bytes` is; the other figures are an A100's

    @property
    def is_tpu(self) -> bool:
        """Whether it is a TPU, whose memory is all for programs, and whose slices have a shape."""
        return any(kind.startswith("TPU") for kind in self.kinds)


def _chip(
    name: str,
    kinds: tuple[str, ...],
    teraflops: tuple[float | None, ...],
    memory: tuple[int, float, float],
    source: str,
    capability: float | None = None,
) -> Chip:
    """`teraflops` by DTYPES, None where there is no such unit; `memory` in bytes, its GB/s, and those of the links."""
    known = zip(DTYPES, teraflops, strict=True)
    flops = {dtype: 1e12 * peak for dtype, peak in known if peak is not None}
    size, speed, link = memory
    return Chip(
        name=name,
        kinds=kinds,
        flops=MappingProxyType(flops),
        memory_bytes=size,
        memory_speed=GB * speed,
        link_speed=GB * link,
        source=source,
        capability=capability,
    )


_TPU = "cloud.google.com/tpu/docs, system architecture of each generation"

# NVIDIA's datasheets quote twice these products, with sparsity, and links in both directions together. Products of
# float32 are those that XLA makes of them by default: TF32 where a GPU has it, one pass of bfloat16 on a TPU.
# fmt: off
CHIPS = {
    chip.name: chip
    for chip in (
        _chip("tpu7x", ("TPU7x",), (1153.5, None, 1153.5, None, 2307), (96 * GIB, 3690, 600), f"{_TPU}; a device is half a chip"),
        _chip("v5e", ("TPU v5 lite", "TPU v5e"), (197, None, 197, 394, None), (16 * GIB, 819, 200), _TPU),
        _chip("v5p", ("TPU v5", "TPU v5p"), (459, None, 459, 918, None), (95 * GIB, 2765, 600), _TPU),
        _chip("v6e", ("TPU v6 lite", "TPU v6e"), (918, None, 918, 1836, None), (32 * GIB, 1638, 400), _TPU),
        _chip("v4", ("TPU v4",), (275, None, 275, 275, None), (32 * GIB, 1228, 300), _TPU),
        _chip("v3", ("TPU v3",), (61.5, None, 61.5, None, None), (16 * GIB, 450, 140), f"{_TPU}; a device is half a chip"),
        _chip("v2", ("TPU v2",), (22.5, None, 22.5, None, None), (8 * GIB, 350, 62), f"{_TPU}; a device is half a chip"),
        _chip("b300", ("NVIDIA B300 SXM6 AC", "NVIDIA B300"), (2250, 2250, 1125, 125, 4500), (270 * GB, 7700, 900), "NVIDIA HGX B300 datasheet, an eighth of the system", 10.3),
        _chip("gb200", ("NVIDIA GB200",), (2500, 2500, 1250, 5000, 5000), (186 * GB, 8000, 900), "NVIDIA GB200 NVL72 datasheet, a 72nd of the rack", 10.0),
        _chip("b200", ("NVIDIA B200",), (2250, 2250, 1125, 4500, 4500), (180 * GB, 8000, 900), "NVIDIA DGX B200 datasheet", 10.0),
        _chip("h200", ("NVIDIA H200",), (989.4, 989.4, 494.7, 1978.9, 1978.9), (141 * GB, 4800, 450), "NVIDIA H200 datasheet", 9.0),
        _chip("h20", ("NVIDIA H20",), (148, 148, 74, 296, 296), (96 * GB, 4000, 450), "NVIDIA H20 datasheet", 9.0),
        _chip("h100", ("NVIDIA H100 80GB HBM3",), (989.4, 989.4, 494.7, 1978.9, 1978.9), (80 * GB, 3350, 450), "NVIDIA H100 datasheet", 9.0),
        _chip("h100-pcie", ("NVIDIA H100 PCIe",), (756, 756, 378, 1513, 1513), (80 * GB, 2000, 64), "NVIDIA H100 datasheet; linked by PCIe", 9.0),
        _chip("h100-nvl", ("NVIDIA H100 NVL", "NVIDIA H200 NVL"), (835.5, 835.5, 417.8, 1671, 1671), (94 * GB, 3900, 300), "NVIDIA H100 and H200 NVL datasheets, memory of the H100", 9.0),
        _chip("gh200", ("NVIDIA GH200 480GB",), (989.4, 989.4, 494.7, 1978.9, 1978.9), (96 * GB, 4000, 450), "NVIDIA GH200 datasheet", 9.0),
        _chip("a100", ("NVIDIA A100-SXM4-80GB",), (312, 312, 156, 624, None), (80 * GB, 2039, 300), "NVIDIA A100 datasheet", 8.0),
        _chip("a100-40", ("NVIDIA A100-SXM4-40GB",), (312, 312, 156, 624, None), (40 * GB, 1555, 300), "NVIDIA A100 datasheet", 8.0),
        _chip("a100-pcie", ("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"), (312, 312, 156, 624, None), (40 * GB, 1555, 32), "NVIDIA A100 datasheet, memory of the smaller; linked by PCIe", 8.0),
        _chip("mi300x", ("AMD Instinct MI300X", "AMD Instinct MI300X OAM"), (1307.4, 1307.4, 163.4, 2614.9, 2614.9), (192 * GB, 5300, 448), "AMD Instinct MI300X datasheet; float32 without TF32"),
        _chip("l40s", ("NVIDIA L40S",), (362, 362, 183, 733, 733), (48 * GB, 864, 32), "NVIDIA L40S datasheet; linked by PCIe", 8.9),
        _chip("l4", ("NVIDIA L4",), (121, 121, 60, 242, 242), (24 * GB, 300, 32), "NVIDIA L4 datasheet; linked by PCIe", 8.9),
        _chip("a10", ("NVIDIA A10",), (125, 125, 62.5, 250, None), (24 * GB, 600, 32), "NVIDIA A10 datasheet; linked by PCIe", 8.6),
        _chip("a10g", ("NVIDIA A10G",), (70, 70, 35, 140, None), (24 * GB, 600, 32), "NVIDIA A10G datasheet; linked by PCIe", 8.6),
        _chip("a6000", ("NVIDIA RTX A6000",), (154.8, 154.8, 77.4, 309.7, None), (48 * GB, 768, 32), "NVIDIA RTX A6000 datasheet; linked by PCIe", 8.6),
        _chip("rtx5090", ("NVIDIA GeForce RTX 5090",), (209.5, 209.5, 104.8, 838, 419), (32 * GB, 1792, 64), "NVIDIA RTX Blackwell architecture paper, sums in float32; linked by PCIe", 12.0),
        _chip("rtx4090", ("NVIDIA GeForce RTX 4090",), (165.2, 165.2, 82.6, 660.6, 330.3), (24 * GB, 1008, 32), "NVIDIA Ada architecture paper, sums in float32; linked by PCIe", 8.9),
        _chip("rtx3090", ("NVIDIA GeForce RTX 3090",), (71, 71, 35.6, 284, None), (24 * GB, 936, 32), "NVIDIA GA102 architecture paper, sums in float32; linked by PCIe", 8.6),
        _chip("v100", ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"), (None, 125, 15.7, None, None), (16 * GB, 900, 150), "NVIDIA V100 datasheet, memory of the smaller", 7.0),
        _chip("t4", ("Tesla T4",), (None, 65, 8.1, 130, None), (16 * GB, 320, 16), "NVIDIA T4 datasheet; linked by PCIe", 7.5),
    )
}
# fmt: on
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


# cloud.google.com/tpu/docs: v5p and tpu7x count cores, two a chip; the others count chips. JAX shows both cores of a v5p
# as one device, and those of a tpu7x as two.
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
        *(
            Machine(
                name=f"tpu7x-{2 * x * y * z}",
                chip=CHIPS["tpu7x"],
                devices=2 * x * y * z,
                topology=f"tpu7x:{x}x{y}x{z}",
            )
            for x, y, z in _CUBES
        ),
    )
}


MEMORY = "--memory"  # the flag with the memory of a device


def machine(name: str, *, flag: str, memory: str | None = None) -> Machine:
    """Return the machine of a name: a TPU slice (`v5e-16`), a GPU (`h200`), or several of one host (`h100x8`).

    Args:
      name: of a slice or a chip in the table; with `memory`, of any GPU.
      flag: where the name was given, for the error.
      memory: what one GPU has, such as `24GB`. It replaces the table's figure; for a GPU that is not in the table it is
        all that is known, and its `Chip.is_known` is False.

    Raises:
      CommandError: for a name that is not in the table without `memory`, and for a `memory` of a TPU or of no size.
    """
    if name in SLICES and memory is None:
        return SLICES[name]
    # The x of rtx4090 begins no count.
    match = re.fullmatch(r"(.+?)(?:(?<!rt)x([1-9][0-9]{0,4}))?", name)
    base, devices = (match[1], int(match[2] or 1)) if match else (name, 1)
    chip = CHIPS.get(base)
    if memory is not None and match:
        if name in SLICES or (chip and chip.is_tpu):
            raise CommandError(
                f"{MEMORY} is for GPUs",
                where=f"{flag}={name} {MEMORY}={memory}",
                why="the memory of every TPU is in the table",
                fix=f"leave {MEMORY} out",
            )
        known = chip or dataclasses.replace(
            CHIPS["a100"], name=base, kinds=(), source="", capability=None, is_known=False
        )
        chip = dataclasses.replace(known, memory_bytes=_bytes(memory))
    if chip and not (chip.is_tpu and match and match[2]):
        return Machine(name=name, chip=chip, devices=devices)
    if meant := _meant(name):
        fix = f"{flag}={meant}"
    elif re.fullmatch(r"(tpu-?)?v[0-9]{1,2}[a-z]?([-x][0-9]+)?", name.lower()):
        fix = "name a TPU of the table"  # a memory is given for GPUs alone
    else:
        fix = f"{flag}={name or 'mygpu'} {MEMORY}=24GB    # the memory of one"
    raise CommandError(
        f"there is no machine {name!r} in the table",
        where=f"{flag}={name}",
        why=f"chips: {', '.join(CHIPS)}; several as h100x8; slices of TPUs as v5e-16, v5p-128, v6e-256, tpu7x-64\n"
        f"for any other GPU give the memory of one with {MEMORY}",
        fix=fix,
    )


def tpu_slice(name: str, *, flag: str) -> Machine:
    """Return the TPU slice of a name such as `v5e-16`. `flag` is where the name was given.

    Raises:
      CommandError: for another name; the fix is the smallest slice of that chip with as many devices.
    """
    if name not in SLICES:
        raise CommandError(
            f"there is no TPU slice {name!r} in the table",
            where=f"{flag}={name}",
            why=f"the slices are {', '.join(SLICES)}",
            fix=f"{flag}={_slice(name) or _SMALLEST}",
        )
    return SLICES[name]


_SMALLEST = next(iter(SLICES))
_UNITS = {"MB": 10**6, "GB": GB, "MIB": 2**20, "GIB": GIB}


def _bytes(memory: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([MG]i?B)", memory, re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if not size:
        number = re.match(r"[0-9]+(\.[0-9]+)?", memory)
        raise CommandError(
            f"{memory!r} is no size of memory",
            where=f"{MEMORY}={memory}",
            why="a number above 0 and a unit: MB, GB, MiB or GiB",
            fix=f"{MEMORY}={number[0] if number and float(number[0]) else 24}GB",
        )
    return size


def _meant(name: str) -> str | None:
    """Return the machine that `name` spells with other capitals and signs; None if there is none.

    A name with other letters or digits is another chip: an `a11` is not meant to be an `a10`.
    """
    plain = re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())
    known = [*SLICES, *CHIPS, *(f"{chip.name}x8" for chip in CHIPS.values() if not chip.is_tpu)]
    same = (each for each in known if re.sub(r"[^a-z0-9]", "", each) == plain)
    card = re.fullmatch(r"[0-9]{4}(x[0-9]+)?", plain)  # of the RTX line
    if card and f"rtx{plain[:4]}" in CHIPS:
        return f"rtx{plain}"
    return _slice(name) or next(same, None)


def _slice(name: str) -> str | None:
    """Return the smallest slice of a named TPU that has as many devices, or its largest; None if no TPU is named."""
    match = re.fullmatch(r"(v5e|v5p|v6e|tpu7x)(?:[-x]?([0-9]+))?", name)
    if not match:
        return None
    wanted = int(match[2] or 1)
    own = {int(each.rpartition("-")[2]): each for each in SLICES if each.startswith(f"{match[1]}-")}
    return own[min((count for count in own if count >= wanted), default=max(own))]
