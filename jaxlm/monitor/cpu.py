"""The processor at hand: what it multiplies and copies, measured, and its memory. Free of JAX."""

import functools
import os
import time
from typing import Any

from jaxlm.core import processor
from jaxlm.monitor.chips import Chip, Machine

# Times what products reach in float32, by the unit that multiplies bfloat16 (scripts/LOG.md). With AMX a step of many tokens
# reaches that, single products 3 to 6 times; with vectors single products do.
GAINS = {processor.AMX: 3, processor.VECTORS: 2}


def this_machine(devices: int, assumed: list[str]) -> Machine:
    """The CPU at hand, as `_measured` once in a process."""
    flops, copied = _measured()
    memory = physical_bytes()
    assumed.append(
        f"this CPU's products run at {flops / 1e9:.0f} GFLOP/s and its copies at {copied / 1e9:.1f} GB/s, as measured now"
    )
    gain, unit = max(((GAINS[unit], unit) for unit in processor.units()), default=(1, ""))
    if unit:
        assumed.append(f"products of bfloat16 are up to {gain} times as fast: this CPU has {unit}")
    chip = Chip(
        name="cpu",
        kinds=("cpu",),
        flops={
            "float32": flops / devices,
            "bfloat16": gain * flops / devices,
            "float16": flops / devices,
        },
        memory_bytes=memory // devices,
        memory_speed=copied / devices,
        link_speed=copied / devices,
        source="measured",
    )
    return Machine(name="cpu", chip=chip, devices=devices)


@functools.cache
def _measured() -> tuple[float, float]:
    """FLOPs a second of this machine's BLAS in float32, and bytes a second that it copies; measured for a twentieth of a second."""
    import numpy as np  # not needed for other machines

    side = 512
    a = np.ones((side, side), np.float32)
    a @ a  # threads start
    flops = 2 * side**3 / min(_timed(lambda: a @ a) for _ in range(5))
    block = np.zeros(8 * 2**20, np.float32)
    return flops, 2 * block.nbytes / min(_timed(block.copy) for _ in range(3))


def physical_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _timed(function: Any) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun
