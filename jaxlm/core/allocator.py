"""Settings of the C library's memory allocator."""

import ctypes
import platform

# glibc's malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4


def keep_freed() -> bool:
    """Keep the memory that this process's main thread frees for later allocations.

    glibc returns large blocks to the system at once. XLA allocates all temporaries of a program as
    one block, so each step on a CPU would get new pages, which the system zeroes on first access: a
    sixth to a quarter of the step's time. Blocks of other threads are still returned, so dispatch
    must not be asynchronous. The process keeps its peak usage. Returns False if the C library has
    no such setting.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, -1))
