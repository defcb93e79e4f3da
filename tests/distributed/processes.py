"""What runs on this machine."""

import contextlib
from pathlib import Path


def running(group: int) -> list[int]:
    """The processes of a group that have not ended; one that nobody has reaped yet has."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(") ")[2].split()[:3]
            if int(pgrp) == group and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


def is_mapped(path: str) -> bool:
    """Whether a process that lives has the file in its memory: shared memory that others use is not left behind."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if path in maps.read_text(errors="replace"):
                return True
    return False
