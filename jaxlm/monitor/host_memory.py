"""How much memory it takes."""

import re
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple


class Peak(NamedTuple):
    """The most bytes in use so far, on the fullest device or, where devices do not say, in this process."""

    bytes: int
    of: Literal["device", "process"]


def peak(devices: Sequence[Any]) -> Peak:
    """The peak of this process's JAX devices. A CPU reports none: there it is the process's resident set, Python included."""
    stats = [device.memory_stats() for device in devices]
    known = [
        entry["peak_bytes_in_use"] for entry in stats if entry and "peak_bytes_in_use" in entry
    ]
    if known:
        return Peak(max(known), "device")
    return Peak(_resident(), "process")


def _resident() -> int:
    """The most bytes of this program that were in memory at a time."""
    try:
        # Linux hands ru_maxrss on from whoever started the process, however large that was.
        status = Path("/proc/self/status").read_text()
        if found := re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE):
            return int(found[1]) * 1024
    except OSError:
        pass
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024
