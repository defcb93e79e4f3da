"""Peak memory of devices or of the process."""

import re
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple


class Peak(NamedTuple):
    """Largest number of bytes in use so far, on the fullest device or in this process."""

    bytes: int
    of: Literal["device", "process"]


def peak(devices: Sequence[Any]) -> Peak:
    """Return the peak of JAX devices. For a CPU, which reports none, that of the process (RSS)."""
    stats = [device.memory_stats() for device in devices]
    known = [
        entry["peak_bytes_in_use"] for entry in stats if entry and "peak_bytes_in_use" in entry
    ]
    if known:
        return Peak(max(known), "device")
    return Peak(_resident(), "process")


def _resident() -> int:
    """Return the peak resident set size of this program in bytes."""
    try:
        # On Linux ru_maxrss includes the parent process's peak before exec.
        status = Path("/proc/self/status").read_text()
        if match := re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE):
            return int(match[1]) * 1024
    except OSError:
        pass
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024
