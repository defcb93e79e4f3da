"""The compute backend: platform of compiled programs, CPU instructions and the allocator."""

import contextlib
import contextvars
import ctypes
import functools
import platform as host
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from jaxlm.core.precision_config import Float

CPUINFO = Path("/proc/cpuinfo")
AMX, VECTORS = "amx_bf16", "avx512_bf16"  # bfloat16 products in tiles, and in vectors
AVX2, AVX512 = "avx2", "avx512f"  # vectors of 256 and of 512 bits
INTEL = "GenuineIntel"
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's malloc.h

_other: contextvars.ContextVar[str | None] = contextvars.ContextVar("backend", default=None)


def name() -> str:
    """Return the platform of the traced program, `cpu`, `gpu` or `tpu`; see `compiling_for`."""
    import jax  # the rest of this module is used without JAX

    return _other.get() or jax.default_backend()


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Trace for another platform; a function that `jax.jit` traced before keeps its program."""
    token = _other.set(platform)
    try:
        yield
    finally:
        _other.reset(token)


def cpu_units() -> frozenset[str]:
    """Return which of `AMX` and `VECTORS` this CPU has, by Linux's CPU flags; empty elsewhere."""
    return _words(CPUINFO) & {AMX, VECTORS}


def fast_cpu_units() -> frozenset[str]:
    """Return those of `cpu_units` that multiply bfloat16 faster than float32.

    Intel's vectors multiply both at one rate, and XLA reaches less of it in bfloat16: 0.8 times the
    speed at 256 to 4,096 rows (jax 0.12). Those of AMD reach up to twice the speed of float32.
    """
    return cpu_units() - {VECTORS} if is_intel() else cpu_units()


def is_intel() -> bool:
    """Return whether Linux names Intel as the vendor of this CPU; false on other systems."""
    return INTEL in _words(CPUINFO)


def has_vectors() -> bool:
    """Return whether this CPU has AVX2, by Linux's CPU flags; false on other systems."""
    return AVX2 in _words(CPUINFO)


def has_wide_vectors() -> bool:
    """Return whether this CPU has AVX-512, by Linux's CPU flags; false on other systems."""
    return AVX512 in _words(CPUINFO)


@functools.cache  # called for every weight; slow on machines with many cores
def _words(path: Path) -> frozenset[str]:
    known = {AMX, VECTORS, AVX2, AVX512, INTEL}
    with contextlib.suppress(OSError):
        return frozenset(known.intersection(path.read_text().split()))
    return frozenset()


def fastest_dtype() -> Float:
    """Return the dtype of matrix operands that this backend has fast units for.

    It is bfloat16 if the backend multiplies it faster than float32, on a CPU see `fast_cpu_units`.
    A GPU has units for bfloat16 from compute capability 8.0 on, and for float16 from 7.0 on (CUDA C
    Programming Guide, section 17.2); every GPU of AMD that JAX supports has both. Starts JAX.
    """
    import jax

    if name() == "cpu":
        return "bfloat16" if fast_cpu_units() else "float32"
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    if name() == "gpu" and re.fullmatch(r"\d+\.\d+", capability) and float(capability) < 8:
        return "float16" if float(capability) >= 7 else "float32"
    return "bfloat16"


def cached_dtype(compute: Float, *, is_cpu: bool) -> Float:
    """Return the dtype of a KV cache, and of the operands of attention over it.

    It is `compute`, the dtype of matrix operands, and on a CPU float32, the dtype of activations
    there. If this machine's CPU has units for bfloat16, XLA from jax 0.12 on multiplies and writes
    it; otherwise it would convert the whole cache for each token.
    """
    is_fast = compute == "bfloat16" and bool(cpu_units()) and jax_version() >= (0, 12)
    return "float32" if is_cpu and not is_fast else compute


@functools.cache
def jax_version() -> tuple[int, ...]:
    """Return the first two numbers of the version of JAX, without importing it."""
    return tuple(map(int, metadata.version("jax").split(".")[:2]))


def keep_freed_memory() -> bool:
    """Keep memory that the main thread frees for later allocations; False without glibc.

    glibc returns large blocks to the system at once. XLA allocates all temporaries of a program as
    one block, so each step on a CPU would get new pages, which the system zeroes on first access: a
    sixth to a quarter of the step's time. Blocks of other threads are still returned, so dispatch
    must not be asynchronous. The process keeps its peak usage.
    """
    if host.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, -1))


def release_freed_memory() -> bool:
    """Return freed memory to the system; False without glibc.

    After `keep_freed_memory` small blocks that live on split the large free blocks, so programs of
    different sizes, and saves in the background, would each add their own memory to the peak.
    """
    if host.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL(None).malloc_trim(0))
