"""Published peak performance of accelerators, and machines built of them. Free of JAX.

Example:
    >>> machine("h100x8", flag="--on").chip.flops["bfloat16"] / 1e12, peak_flops("cpu")
    (989.4, None)
"""

import csv
import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from jaxlm.core.errors import CommandError

Dtype = Literal["bfloat16", "float16", "float32", "int8", "fp8"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
GIB, GB = 2**30, 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One device as JAX counts devices. `flops` are dense FLOP/s by the dtype of the operands."""

    name: str
    kinds: tuple[str, ...]  # exact device_kind in JAX; a slice of a chip (MIG) has another
    flops: Mapping[Dtype, float]
    memory_bytes: int
    memory_speed: float  # bytes a second
    link_speed: float  # bytes a second sent to neighbors over the fast interconnect, all links
    source: str
    capability: float | None = None  # CUDA compute capability
    is_known: bool = True  # if False, all figures but `memory_bytes` are an A100's

    @property
    def is_tpu(self) -> bool:
        """Return True for a TPU: its whole memory is for programs, its slices have a shape."""
        return any(kind.startswith("TPU") for kind in self.kinds)


_UNITS = {"MB": 10**6, "GB": GB, "MIB": 2**20, "GIB": GIB}


def _chip(row: dict[str, str]) -> Chip:
    """Make a chip of a row of the table."""
    size, unit = row["memory"].split()
    flops = {dtype: 1e12 * float(row[dtype]) for dtype in DTYPES if row[dtype]}
    return Chip(
        name=row["name"],
        kinds=tuple(row["kinds"].split("|")),
        flops=MappingProxyType(flops),
        memory_bytes=int(size) * _UNITS[unit.upper()],
        memory_speed=GB * float(row["memory_speed"]),
        link_speed=GB * float(row["link_speed"]),
        source=row["source"],
        capability=float(row["capability"]) if row["capability"] else None,
    )


# chips.csv has the TFLOP/s by dtype (empty if unsupported), the memory, and the GB/s of memory and
# links. NVIDIA's datasheets quote twice these FLOP/s, with sparsity, and links in both directions
# together. float32 is XLA's default matmul precision: TF32 on a GPU that has it, one bfloat16 pass
# on a TPU.
with open(Path(__file__).with_suffix(".csv"), encoding="utf-8", newline="") as _file:
    CHIPS = {row["name"]: _chip(row) for row in csv.DictReader(_file)}
_OF_KIND = {kind: chip for chip in CHIPS.values() for kind in chip.kinds}


def of_kind(device_kind: str) -> Chip | None:
    """Return the chip with this device_kind in JAX; None if the table has none."""
    return _OF_KIND.get(device_kind)


def fastest_dtype(chip: Chip) -> Literal["float32", "bfloat16", "float16"]:
    """Return the dtype that `precision.compute=auto` is on a chip, as `backend.fastest_dtype`."""
    if "bfloat16" not in chip.flops:
        return "float16" if "float16" in chip.flops else "float32"
    is_slow = chip.name == "cpu" and chip.flops["bfloat16"] <= chip.flops["float32"]
    return "float32" if is_slow else "bfloat16"


def peak_flops(device_kind: str, devices: int = 1) -> float | None:
    """Return the bfloat16 (else float16) peak of `devices`; None if unknown, as for a CPU."""
    chip = of_kind(device_kind)
    peak = chip.flops.get("bfloat16", chip.flops.get("float16", 0.0)) if chip else None
    return None if peak is None else devices * peak


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices joined by a fast interconnect. `topology` is a slice's name in the TPU compiler."""

    name: str
    chip: Chip
    devices: int
    topology: str | None = None


# cloud.google.com/tpu/docs: v5p and tpu7x count cores, two a chip; the others count chips. JAX
# shows both cores of a v5p as one device, and those of a tpu7x as two.
_GRIDS = ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8))
SLICES = {
    (name := f"{chip}-{counted * math.prod(sides)}"): Machine(
        name=name,
        chip=CHIPS[chip],
        devices=devices * math.prod(sides),
        topology=f"{chip}:{'x'.join(map(str, sides))}",
    )
    for chip, shapes, counted, devices in (
        *(("v5e", _GRIDS, 1, 1), ("v6e", _GRIDS, 1, 1)),
        *(("v5p", _CUBES, 2, 1), ("tpu7x", _CUBES, 2, 2)),
    )
    for sides in shapes
}
_SMALLEST = next(iter(SLICES))

MEMORY = "--memory"  # flag for the memory of a device


def machine(name: str, *, flag: str, memory: str | None = None) -> Machine:
    """Return the machine of a name: a TPU slice (`v5e-16`), a GPU (`h200`), or several (`h100x8`).

    `memory`, that of one GPU, such as `24GB`, replaces the table's figure. For a GPU that is not in
    the table nothing else is known, and its `Chip.is_known` is False. `flag` has the name, for the
    error. Raises CommandError if the name is not in the table and there is no `memory`, or if
    `memory` is malformed or for a TPU.
    """
    if name in SLICES and memory is None:
        return SLICES[name]
    # The x of rtx4090 is part of the name.
    match = re.fullmatch(r"(.+?)(?:(?<!rt)x([1-9][0-9]{0,4}))?", name)
    base, devices = (match[1], int(match[2] or 1)) if match else (name, 1)
    chip = CHIPS.get(base)
    if memory is not None and match:
        if name in SLICES or (chip and chip.is_tpu):
            what, where = f"{MEMORY} applies to GPUs only", f"{flag}={name} {MEMORY}={memory}"
            why = "the memory of every TPU is in the table"
            raise CommandError(what, where=where, why=why, fix=f"leave {MEMORY} out")
        unknown = dict(name=base, kinds=(), source="", capability=None, is_known=False)
        changes: dict[str, Any] = {} if chip else unknown
        chip = dataclasses.replace(chip or CHIPS["a100"], **changes, memory_bytes=_bytes(memory))
    if chip and not (chip.is_tpu and match and match[2]):
        return Machine(name=name, chip=chip, devices=devices)
    if meant := _meant(name):
        fix = f"{flag}={meant}"
    elif re.fullmatch(r"(tpu-?)?v[0-9]{1,2}[a-z]?([-x][0-9]+)?", name.lower()):
        fix = "name a TPU of the table"  # a memory is given for GPUs alone
    else:
        fix = f"{flag}={name or 'mygpu'} {MEMORY}=24GB    # the memory of one"
    why = f"chips: {', '.join(CHIPS)}; several as h100x8; slices of TPUs as v5e-16, v5p-128, "
    why += f"v6e-256, tpu7x-64\nfor any other GPU give the memory of one with {MEMORY}"
    what = f"there is no machine {name!r} in the table"
    raise CommandError(what, where=f"{flag}={name}", why=why, fix=fix)


def tpu_slice(name: str, *, flag: str) -> Machine:
    """Return the TPU slice of a name; CommandError suggests the smallest with as many devices."""
    if name not in SLICES:
        what, why = f"there is no TPU slice {name!r} in the table", ", ".join(SLICES)
        where, meant, why = f"{flag}={name}", _slice(name) or _SMALLEST, f"the slices are {why}"
        raise CommandError(what, where=where, why=why, fix=f"{flag}={meant}")
    return SLICES[name]


def _bytes(memory: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([MG]i?B)", memory, re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if not size:
        number = re.match(r"[0-9]+(\.[0-9]+)?", memory)
        size_gb = number[0] if number and float(number[0]) else 24
        what, where = f"{memory!r} is not a memory size", f"{MEMORY}={memory}"
        why = "a number above 0 and a unit: MB, GB, MiB or GiB"
        raise CommandError(what, where=where, why=why, fix=f"{MEMORY}={size_gb}GB")
    return size


def _meant(name: str) -> str | None:
    """Return the machine whose letters and digits `name` has, or None: `a11` is not `a10`."""
    plain = re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())
    known = [*SLICES, *CHIPS, *(f"{chip.name}x8" for chip in CHIPS.values() if not chip.is_tpu)]
    # Machines of several GPUs: 2xh100x8 is 16 of them.
    several = re.fullmatch(r"([1-9][0-9]{0,2})x([a-z].*?)(?:(?<!rt)x([1-9][0-9]?))?", name)
    if several and (chip := CHIPS.get(several[2])) and not chip.is_tpu:
        return f"{chip.name}x{int(several[1]) * int(several[3] or 1)}"
    same = (each for each in known if re.sub(r"[^a-z0-9]", "", each) == plain)
    card = re.fullmatch(r"[0-9]{4}(x[0-9]+)?", plain)  # of the RTX line
    if card and f"rtx{plain[:4]}" in CHIPS:
        return f"rtx{plain}"
    return _slice(name) or next(same, None)


def _slice(name: str) -> str | None:
    """Return the smallest slice of a named TPU with enough devices, or its largest; else None."""
    match = re.fullmatch(r"(v5e|v5p|v6e|tpu7x)(?:[-x]?([0-9]+))?", name)
    if not match:
        return None
    names = {int(each.rpartition("-")[2]): each for each in SLICES if each.startswith(match[1])}
    enough = (size for size in names if size >= int(match[2] or 1))
    return names[min(enough, default=max(names))]
