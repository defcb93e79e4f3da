"""Processes of this machine."""

import contextlib
from pathlib import Path


def running(group: int) -> list[int]:
    """The processes of a group that have not ended; one that waits to be reaped has ended."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(") ")[2].split()[:3]
            if int(pgrp) == group and state not in "ZX":
                pids.append(int(stat.parent.name))
    return pids


def is_mapped(path: str) -> bool:
    """Return True if a live process has mapped the file: shared memory in use is not a leak."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if path in maps.read_text(errors="replace"):
                return True
    return False
