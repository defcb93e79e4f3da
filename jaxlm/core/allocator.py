"""What the C library does with memory that is freed."""

import ctypes
import platform

# glibc's malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4


def keep_freed() -> bool:
    """Lets this process keep what its main thread frees, for what that asks for next; whether the C library can.

    glibc gives large blocks back to the system at once. XLA asks for all temporaries of a program as one, so each step on
    a CPU would get them as new pages, which the system zeroes when they are touched: a sixth to a quarter of its time.
    Blocks of other threads still go back, so dispatch must not be asynchronous. Kept is the most that was in use.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, -1))
