"""What the processor at hand multiplies in hardware. Free of JAX."""

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
AMX, VECTORS = "amx_bf16", "avx512_bf16"  # products of bfloat16 in tiles, and in vectors


def units() -> frozenset[str]:
    """Those of `AMX` and `VECTORS` that this CPU has, by the flags that Linux shows; none where nothing shows them."""
    try:
        shown = CPUINFO.read_text().split()
    except OSError:
        return frozenset()
    return frozenset({AMX, VECTORS}.intersection(shown))
