"""How much memory it takes."""

import resource
import sys
from collections.abc import Sequence
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
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Peak(resident if sys.platform == "darwin" else resident * 1024, "process")
