"""Units of work as every engine does them: what a process answers of one, and what a unit is given up for."""

import traceback
from collections.abc import Callable
from typing import Any

from jaxlm.core import errors
from jaxlm.core.errors import JaxlmError, NotWritable, PeerLost

Task = Callable[
    [int], dict[str, float]
]  # does the unit of a number; gives a core's seconds by stage
Opens = Callable[[], Task]  # called in the process that works: pickled, and hashed by its value
DEATHS = 2  # of processes over one unit, after which it is the unit's fault


def done(task: Task, number: int) -> dict[str, float]:
    """Does a unit.

    Raises:
      NotWritable: where the output cannot be written, as on a full disk.
    """
    try:
        return task(number)
    except OSError as error:
        raise NotWritable(
            "a unit of work cannot be written",
            where=str(error.filename or f"unit {number}"),
            why=f"{type(error).__name__}: {error.strerror}",
            fix="make room, then the same command again: it goes on where it stopped",
        ) from error


class Worker:
    """A process's side: units one after another, each answered in JSON. What the task needs is made with the first."""

    def __init__(self, opens: Opens):
        self._opens = opens
        self._task: Task | None = None

    def answer(self, number: int) -> dict[str, Any]:
        """`seconds` of a unit that is done, or `error`."""
        try:
            if self._task is None:
                self._task = self._opens()
            return {"seconds": done(self._task, number)}
        except JaxlmError as error:
            parts = {name: getattr(error, name) for name in ("what", "where", "why", "fix")}
            return {"error": {"class": type(error).__name__, **parts}}
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            why = traceback.format_exc()[-1500:]
            return {"error": {"class": "JaxlmError", "what": what, "why": why}}


def raised(parts: dict[str, str]) -> JaxlmError:
    """The error that a process answered, as what it was."""
    kind = getattr(errors, parts["class"], JaxlmError)
    return kind(parts["what"], **{name: parts.get(name, "") for name in ("where", "why", "fix")})


def given_up(lost: list[str]) -> PeerLost:
    """That some units, named with how their processes ended, are not done, though all others are."""
    return PeerLost(
        f"{DEATHS} processes ended over one unit of work",
        where=lost[0],
        why=f"all other units are done; {len(lost)} of them ended so, as for want of memory",
        fix="the same command with --workers=1, which needs less memory",
    )
