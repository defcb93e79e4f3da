"""Changing a run while it runs: the file that is read, and what was changed, so that it is the same when done again.

`{"lr": 1e-4}` in control.json is the peak learning rate from the next update on; the schedule keeps its course. null is that
of the config.
"""

import dataclasses
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxlm.core.callbacks import Log
from jaxlm.core.quoting import safe
from jaxlm.monitor import sinks
from jaxlm.monitor.sinks import Shape
from jaxlm.training.rundir import RunDir

WANTED = "control.json"
FILE = "control.jsonl"
LARGEST = 4096  # bytes of what is read


@dataclasses.dataclass(frozen=True)
class Change:
    """The peak learning rate of the updates after `step` completed ones; None is that of the config."""

    step: int
    lr: float | None


def _is_rate(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (is_number and 0 < value <= sys.float_info.max)


SHAPE: Shape = {"step": sinks.is_step, "lr": _is_rate}


class Control:
    """The changes of a run, each made after a step, and made after it again when the run passes it again.

    Args:
      lr: `optim.lr` of the config.
      changes: those that are known, in the order of their steps.
      say: is told of each change, and of what is wrong with control.json.
    """

    def __init__(
        self,
        directory: RunDir,
        lr: float,
        changes: Iterable[Change],
        say: Log,
    ):
        self._directory, self._lr, self._say = directory, lr, say
        self._refused = ""  # what was said last of a file that stays as it is
        self._changes = [*changes]

    def look(self, step: int, share: Callable[[Any], Any]) -> None:
        """Takes over what control.json asks for, for the updates after `step` completed ones. The first process reads."""
        found = share(self._asked() if self._directory.is_writer else None)
        newest = self._changes[-1].lr if self._changes else None
        if found is None or found["lr"] == newest:
            return
        change = Change(step, found["lr"])
        self._changes = [*(each for each in self._changes if each.step < step), change]
        if self._directory.is_writer:
            sink = self._directory.journal(FILE)
            try:
                sink.write(dataclasses.asdict(change))
            finally:
                sink.close()
        self._say(
            f"after step {step} the peak learning rate is {self._lr if change.lr is None else change.lr:g}, "
            f"as {WANTED} asks; it was {self._lr if newest is None else newest:g}"
        )

    def rate(self, step: int) -> float:
        """The learning rate over the schedule's, of the update after `step` completed ones."""
        return rate(self._changes, step, self._lr)

    def as_json(self, step: int) -> list[dict[str, Any]]:
        """The changes that a checkpoint of this step has seen."""
        return [dataclasses.asdict(each) for each in self._changes if each.step < step]

    def _asked(self) -> dict[str, Any] | None:
        """What the file asks for; None where there is none, or nothing that can be done. What is wrong is said once."""
        try:
            found = _read(self._directory.path / WANTED)
        except FileNotFoundError:
            self._refused = ""
            return None
        except (OSError, ValueError, RecursionError) as error:
            if str(error) != self._refused:
                self._say(f"{WANTED} is left aside: {safe(str(error))[:200]}")
                self._refused = str(error)
            return None
        self._refused = ""
        return found


def known(workdir: Path, meta: dict[str, Any], share: Callable[[str, Any], Any]) -> list[Change]:
    """The changes that the first process knows of: from the file, or where that is lost from the checkpoint's `meta`."""
    found = [dataclasses.asdict(each) for each in read(workdir)] or meta.get("control", [])
    return [Change(**values) for values in share("changes", found)]


def read(workdir: Path) -> list[Change]:
    """The changes of a run in the order of their steps. One that came later gives up those after its own step.

    Raises:
      DataError: where the file is damaged.
    """
    found: list[Change] = []
    for record in sinks.read(workdir / FILE, SHAPE):
        change = Change(record["step"], record["lr"])
        found = [*(each for each in found if each.step < change.step), change]
    return found


def rate(changes: Iterable[Change], step: int, lr: float) -> float:
    """The learning rate over that of a schedule with the peak `lr`, of the update after `step` completed ones."""
    made = [each for each in changes if each.step <= step]
    return made[-1].lr / lr if made and made[-1].lr is not None else 1.0


def _read(path: Path) -> dict[str, Any]:
    """The one thing that may be asked for. Raises ValueError with what is wrong."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
            raise ValueError("everybody may write it; chmod o-w")
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"it has more than {LARGEST} bytes")
    found = json.loads(content)
    if not isinstance(found, dict) or set(found) != {"lr"} or not _is_rate(found["lr"]):
        raise ValueError('it is not {"lr": a number above zero, or null}')
    return found
