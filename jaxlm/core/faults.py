"""Fault injection for tests.

`JAXLM_FAULTS` holds faults such as `save.commit:sigkill@4` or `step.before:sleep=3@10-12#1`,
separated by commas: a point in the code, an action, optionally the steps (one, or a range with both
ends) and the rank of the process. Without the variable every point is an empty function.

Actions at a point: raise, sigkill, sigterm, hang, enospc, sleep=SECONDS; at `store.read`, where
checkpoint files are read for hashing, and at `text.read`, where text is read, also slow=BYTES, the
speed per second of a slow disk. Faults in numbers have no point but `grads` and `loss` (nan, inf,
neginf, spike=VALUE: the value of one element of a step's gradient, or of its loss) and `batch`
(nan: of a batch, by its number in the stream).
"""

import dataclasses
import errno
import os
import re
import signal
import time

VARIABLE = "JAXLM_FAULTS"
POINTS = (
    "compile data.next step.before step.after save.begin save.files save.upload save.digest "
    "save.commit save.retire restore.verify store.read text.read restore.read rewind eval "
    "prepare.clean prepare.merge prepare.finish prepare.tokenize rollout.draw rollout.score exit "
    "teach.row teach.finish"
).split()
NUMBERS = ("grads", "loss", "batch")
_FORM = re.compile(
    r"(?P<point>[\w.]+):(?P<action>\w+)(=(?P<value>[\d.]+))?"
    r"(@(?P<low>\d+)(-(?P<high>\d+))?)?(#(?P<rank>\d+))?"
)

rank = 0  # of this process; set by multi-process runs


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault: point, action, steps (both ends included) and rank; None means all."""

    point: str
    action: str
    value: float
    low: int
    high: int | None
    rank: int | None

    def is_at(self, step: int | None) -> bool:
        """Return True if the fault strikes at this step, on this rank."""
        if self.rank not in (None, rank):
            return False
        return step is None or (self.low <= step and (self.high is None or step <= self.high))


def parse(text: str) -> tuple[Fault, ...]:
    """Parse the variable. Raises ValueError: a test whose malformed fault breaks nothing passes."""
    faults = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _FORM.fullmatch(part)
        if match is None or match["point"] not in (*POINTS, *NUMBERS):
            raise ValueError(f"{VARIABLE} holds {part!r}, which names no point and action")
        low = int(match["low"] or 0)
        high = int(match["high"] or match["low"]) if match["low"] else None
        on = None if match["rank"] is None else int(match["rank"])
        value = float(match["value"] or 0)
        faults.append(Fault(match["point"], match["action"], value, low, high, on))
    return tuple(faults)


_faults = parse(os.environ.get(VARIABLE, ""))


def point(name: str, step: int | None = None, size: int | None = None) -> None:
    """Strike here if a fault names this point, at which `size` bytes are read."""
    for fault in _faults:
        if fault.point == name and fault.is_at(step):
            _strike(fault, size)


def planned(name: str) -> tuple[Fault, ...]:
    """Return the faults in numbers, one of `NUMBERS`."""
    return tuple(fault for fault in _faults if fault.point == name)


def _strike(fault: Fault, size: int | None) -> None:
    match fault.action:
        case "slow" if size is not None:
            time.sleep(size / fault.value)
        case "raise":
            raise RuntimeError(f"injected fault at {fault.point}")
        case "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "sigkill" | "sigterm":
            os.kill(os.getpid(), signal.Signals[fault.action.upper()])
        case "sleep":
            time.sleep(fault.value)
        case "hang":
            while True:
                time.sleep(3600)
        case other:
            raise ValueError(f"{VARIABLE} has unknown action {other!r} at {fault.point}")
