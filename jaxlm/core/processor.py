"""bfloat16 matrix instructions of the CPU. Imports no JAX."""

import functools
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
AMX, VECTORS = "amx_bf16", "avx512_bf16"  # bfloat16 products in tiles, and in vectors


def units() -> frozenset[str]:
    """Return which of `AMX` and `VECTORS` this CPU has, by Linux's CPU flags; empty elsewhere."""
    return _shown(CPUINFO)


@functools.cache  # called for every weight; slow on machines with many cores
def _shown(path: Path) -> frozenset[str]:
    try:
        shown = path.read_text().split()
    except OSError:
        return frozenset()
    return frozenset({AMX, VECTORS}.intersection(shown))
