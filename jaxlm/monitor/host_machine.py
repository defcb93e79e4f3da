"""The host machine: accelerators, measured speed of its CPU, and memory in use. Free of JAX."""

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import os
import re
import resource
import subprocess
import sys
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxlm.core import backend
from jaxlm.monitor import chips
from jaxlm.monitor.chips import Chip, Dtype, Machine

# Speed of bfloat16 matmuls relative to float32, by instruction set (scripts/LOG.md). With AMX a
# step of many tokens reaches it and single matmuls reach 3 to 6; with vectors single ones do.
GAINS = {backend.AMX: 3, backend.VECTORS: 2}
MEASURE_SECONDS = 0.03
# Kernels of OpenBLAS with vectors of 256 bits. It uses them on CPUs of AMD that it does not know.
# XLA uses all 512 bits where there are as many, and is 1.9 times as fast (scripts/LOG.md).
NARROW_KERNELS = ("Haswell", "Zen")
SIDE = 512  # of a product that BLAS computes on all cores
SMALL_SIDE, SMALL_PRODUCTS = 64, 64  # of products that OpenBLAS computes on one core


CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Accelerators known to the operating system, in use by JAX or not."""

    gpus: tuple[str, ...] = ()
    driver: str = ""
    has_tpu: bool = False
    gpu_memory: str = ""  # of one, as `chips.machine` reads it

    @classmethod
    def found(cls) -> "Hardware":
        """Return those of this machine."""
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total",
            "--format=csv,noheader",
        ]
        try:
            output = subprocess.run(query, capture_output=True, text=True, timeout=20)
            lines = output.stdout.splitlines() if output.returncode == 0 else []
        except (OSError, subprocess.TimeoutExpired):
            lines = []
        rows = [
            [part.strip() for part in line.split(",")] for line in lines if line.count(",") == 2
        ]
        gpus = tuple(row[0] for row in rows)
        if not gpus and Path("/dev/nvidia0").exists():
            gpus = ("an NVIDIA GPU",)
        has_tpu = Path("/dev/accel0").exists() or (
            Path("/dev/vfio").exists() and "TPU_ACCELERATOR_TYPE" in os.environ
        )
        return cls(gpus, rows[0][1] if rows else "", has_tpu, rows[0][2] if rows else "")


def used_machine() -> tuple[str, str | None]:
    """Return the name of the machine that JAX would use here, and the memory of an unknown GPU.

    Both are arguments of `chips.machine`. Without a GPU that CUDA_VISIBLE_DEVICES shows, without
    JAX's plugin for it, or with JAX_PLATFORMS=cpu, the name is `cpu`; a TPU has the name of its
    slice.
    """
    platforms = os.environ.get("JAX_PLATFORMS") or "cuda,tpu"
    tpu = os.environ.get("TPU_ACCELERATOR_TYPE", "").replace("v5litepod", "v5e")
    if tpu in chips.SLICES and "tpu" in platforms:
        return tpu, None
    has_plugin = any(map(importlib.util.find_spec, CUDA_PLUGINS))
    is_allowed = re.search("cuda|gpu", platforms) is not None
    hardware = Hardware.found() if has_plugin and is_allowed else Hardware()
    gpus = hardware.gpus
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        gpus = gpus[: len([each for each in visible.split(",") if each.strip()])]
    if not gpus or not hardware.gpu_memory:
        return "cpu", None
    count = f"x{len(gpus)}" if len(gpus) > 1 else ""
    if chip := chips.of_kind(gpus[0]):
        return f"{chip.name}{count}", None
    name = re.sub(r"[^a-z0-9]+", "-", gpus[0].lower()).strip("-")
    return f"{name}{count}", hardware.gpu_memory


def this_machine(devices: int, assumed: list[str]) -> Machine:
    """Return this CPU as a machine, measured once in a process; describe it in `assumed`."""
    flops, copied = _measured()
    if backend.cpu_units() and blas_kernel() in NARROW_KERNELS:
        flops *= 2
        assumed.append("NumPy's matmuls use half of the vectors of this CPU: the compiler's all")
    speeds = f"{flops / 1e9:.0f} GFLOP/s in float32 matmuls and {copied / 1e9:.1f} GB/s in copies"
    assumed.append(f"this CPU measured {speeds}")
    gain, unit = max(((GAINS[unit], unit) for unit in backend.fast_cpu_units()), default=(1, ""))
    if unit:
        assumed.append(f"bfloat16 matmuls are up to {gain} times as fast: this CPU has {unit}")
    gains: dict[Dtype, int] = {"float32": 1, "bfloat16": gain, "float16": 1}
    chip = Chip(
        name="cpu",
        kinds=("cpu",),
        flops={dtype: times * flops / devices for dtype, times in gains.items()},
        memory_bytes=physical_bytes() // devices,
        memory_speed=copied / devices,
        link_speed=copied / devices,
        source="measured",
    )
    return Machine(name="cpu", chip=chip, devices=devices)


@functools.cache
def blas_kernel() -> str:
    """Return the name of the kernels that NumPy's OpenBLAS uses here; empty for another BLAS."""
    import numpy as np  # not imported for other machines

    for path in Path(np.__file__).parent.with_name("numpy.libs").glob("libscipy_openblas*"):
        with contextlib.suppress(OSError, AttributeError):
            call = ctypes.CDLL(str(path)).scipy_openblas_get_corename64_
            call.restype = ctypes.c_char_p
            return str(call().decode())
    return ""


@functools.cache
def _measured() -> tuple[float, float]:
    """Measure for 0.1 s: FLOP/s of this machine's BLAS in float32, and bytes copied per second.

    A product on all cores waits for its slowest thread. While other programs use the cores, it can
    take a hundred times as long (scripts/LOG.md), so products on one core are measured too: they
    are a lower bound, which the load hardly changes. The larger speed counts.
    """
    import numpy as np  # not imported for other machines

    a = np.ones((SIDE, SIDE), np.float32)
    small = np.ones((SMALL_PRODUCTS, SMALL_SIDE, SMALL_SIDE), np.float32)
    block = np.zeros(8 * 2**20, np.float32)
    all_cores = 2 * SIDE**3 / _least_seconds(lambda: a @ a)
    one_core = 2 * SMALL_PRODUCTS * SMALL_SIDE**3 / _least_seconds(lambda: small @ small)
    return max(all_cores, one_core), 2 * block.nbytes / _least_seconds(block.copy, 3)


def _least_seconds(call: Callable[[], object], count: int = 1) -> float:
    """Return the least seconds of calls for MEASURE_SECONDS, without the first; of `count` or more.

    The first call starts threads.
    """
    call()
    times: list[float] = []
    while len(times) < count or sum(times) < MEASURE_SECONDS:
        times.append(timeit.timeit(call, number=1))
    return min(times)


def physical_bytes() -> int:
    """Return this machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class PeakMemory(NamedTuple):
    """Largest number of bytes in use so far, on the fullest device or in this process."""

    bytes: int
    of: Literal["device", "process"]


def peak_memory(devices: Sequence[Any]) -> PeakMemory:
    """Return the peak of JAX devices. For a CPU, which reports none, that of the process (RSS)."""
    stats = [device.memory_stats() or {} for device in devices]
    known = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return PeakMemory(max(known), "device") if known else PeakMemory(_resident(), "process")


def _resident() -> int:
    """Return the peak resident set size of this program in bytes."""
    with contextlib.suppress(OSError):
        # On Linux ru_maxrss includes the parent process's peak before exec.
        status = Path("/proc/self/status").read_text()
        if match := re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE):
            return int(match[1]) * 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024
