"""What the processor at hand multiplies in hardware. Free of JAX."""

import functools
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
AMX, VECTORS = "amx_bf16", "avx512_bf16"  # products of bfloat16 in tiles, and in vectors


def units() -> frozenset[str]:
    """Those of `AMX` and `VECTORS` that this CPU has, by the flags that Linux shows; none where nothing shows them."""
    return _shown(CPUINFO)


@functools.cache  # asked for every weight, and long to make where there are many cores
def _shown(path: Path) -> frozenset[str]:
    try:
        shown = path.read_text().split()
    except OSError:
        return frozenset()
    return frozenset({AMX, VECTORS}.intersection(shown))
