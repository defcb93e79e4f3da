"""Changes to a running run: the file that requests them, and a journal that makes them repeatable.

`{"lr": 1e-4}` in control.json sets the peak learning rate from the next update on and keeps the
shape of the schedule. `null` restores the rate of the config.

Example:
  >>> lr_scale([RateChange(step=100, lr=1e-4)], step=150, lr=4e-4)
  0.25
"""

import contextlib
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

REQUEST = "control.json"
JOURNAL = "control.jsonl"
MAX_BYTES = 4096  # of control.json


@dataclasses.dataclass(frozen=True)
class RateChange:
    """Peak learning rate of the updates after `step` completed ones; of the config if None."""

    step: int
    lr: float | None


def _is_rate(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (is_number and 0 < value <= sys.float_info.max)


SHAPE: Shape = {"step": sinks.is_step, "lr": _is_rate}


class Control:
    """Changes of a run. A change takes effect after a step, also if the step is repeated.

    `lr` is `optim.lr` of the config; `changes` are earlier ones in the order of their steps; `log`
    receives each change and each error of control.json.
    """

    def __init__(self, directory: RunDir, lr: float, changes: Iterable[RateChange], log: Log):
        self._directory, self._lr, self._log = directory, lr, log
        self._refused = ""  # the last logged error of control.json, which is logged once
        self._changes = [*changes]

    def poll(self, step: int, share: Callable[[Any], Any]) -> None:
        """Apply control.json to the updates after `step` completed ones; one process reads it."""
        request = share(self._requested() if self._directory.is_writer else None)
        newest = self._changes[-1].lr if self._changes else None
        if request is None or request["lr"] == newest:
            return
        change = RateChange(step, request["lr"])
        self._changes = [*(each for each in self._changes if each.step < step), change]
        if self._directory.is_writer:
            with contextlib.closing(self._directory.journal(JOURNAL)) as sink:
                sink.write(dataclasses.asdict(change))
        self._log(
            f"after step {step} the peak learning rate is "
            f"{self._lr if change.lr is None else change.lr:g} ({REQUEST}); it was "
            f"{self._lr if newest is None else newest:g}"
        )

    def lr_scale(self, step: int) -> float:
        """Ratio of the learning rate to the schedule's, for the update after `step` steps."""
        return lr_scale(self._changes, step, self._lr)

    def overridden(self, step: int) -> str:
        """Return a line about an `optim.lr` that has no effect after `step`; "" if it has one."""
        made = [each for each in self._changes if each.step <= step]
        if not made or made[-1].lr in (None, self._lr):
            return ""
        return (
            f"optim.lr = {self._lr:g} has no effect: the peak learning rate is {made[-1].lr:g} "
            f'since step {made[-1].step}, by {REQUEST}; write {{"lr": null}} to it to train '
            "with optim.lr"
        )

    def as_json(self, step: int) -> list[dict[str, Any]]:
        """Changes before this step, for its checkpoint."""
        return [dataclasses.asdict(each) for each in self._changes if each.step < step]

    def _requested(self) -> dict[str, Any] | None:
        """Return the content of control.json, None if missing or invalid; log an error once."""
        try:
            request = _read(self._directory.path / REQUEST)
        except FileNotFoundError:
            self._refused = ""
            return None
        except (OSError, ValueError, RecursionError) as error:
            if str(error) != self._refused:
                self._log(f"ignoring {REQUEST}: {safe(str(error))[:200]}")
                self._refused = str(error)
            return None
        self._refused = ""
        return request


def load_changes(
    workdir: Path, meta: dict[str, Any], share: Callable[[str, Any], Any]
) -> list[RateChange]:
    """Return the first process's changes: of the journal, or of the checkpoint's `meta` if lost."""
    records = [dataclasses.asdict(each) for each in read_changes(workdir)] or meta.get(
        "control", []
    )
    return [RateChange(**values) for values in share("changes", records)]


def read_changes(workdir: Path) -> list[RateChange]:
    """Read the changes of a run in the order of their steps.

    A record that was written later cancels the changes at its step and after it. Raises DataError
    if the file is damaged.
    """
    changes: list[RateChange] = []
    for record in sinks.read(workdir / JOURNAL, SHAPE):
        change = RateChange(record["step"], record["lr"])
        changes = [*(each for each in changes if each.step < change.step), change]
    return changes


def lr_scale(changes: Iterable[RateChange], step: int, lr: float) -> float:
    """Ratio of the learning rate to a schedule with the peak `lr`, after `step` updates."""
    made = [each for each in changes if each.step <= step]
    return made[-1].lr / lr if made and made[-1].lr is not None else 1.0


def _read(path: Path) -> dict[str, Any]:
    """Return the content of control.json. Raises ValueError with the reason if it is invalid."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
            raise ValueError("every user can write it; run chmod o-w")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    request = json.loads(content)
    if not isinstance(request, dict) or set(request) != {"lr"} or not _is_rate(request["lr"]):
        raise ValueError('it is not {"lr": a number above zero, or null}')
    return request
