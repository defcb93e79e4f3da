"""Units of work, independent of the engine that runs them: a worker's answer and its failures."""

import traceback
from collections.abc import Callable
from typing import Any

from jaxlm.core import errors
from jaxlm.core.errors import JaxlmError, NotWritable, PeerLost

Task = Callable[
    [int], dict[str, float]
]  # runs the unit of this number; returns CPU seconds by stage
MakeTask = Callable[[], Task]  # called in the worker process: pickled, hashed by value
MAX_DEATHS = 2  # worker processes that may die on a unit before the unit counts as the cause


def done(task: Task, number: int) -> dict[str, float]:
    """Run a unit.

    Raises:
      NotWritable: the output cannot be written, for example on a full disk.
    """
    try:
        return task(number)
    except OSError as error:
        raise NotWritable(
            "a unit of work could not be written",
            where=str(error.filename or f"unit {number}"),
            why=f"{type(error).__name__}: {error.strerror}",
            fix="free disk space, then run the same command again: finished work is kept",
        ) from error


class Worker:
    """The worker's side: runs units one by one, answers in JSON, makes the task at the first."""

    def __init__(self, opens: MakeTask):
        self._opens = opens
        self._task: Task | None = None

    def answer(self, number: int) -> dict[str, Any]:
        """Run a unit; return its `seconds`, or `error`."""
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


def error_of(parts: dict[str, str]) -> JaxlmError:
    """Rebuild the error that a worker answered."""
    kind = getattr(errors, parts["class"], JaxlmError)
    return kind(parts["what"], **{name: parts.get(name, "") for name in ("where", "why", "fix")})


def units_failed(failed_units: list[str]) -> PeerLost:
    """Return the error for units whose workers kept dying; entries name a unit and its cause."""
    return PeerLost(
        f"{MAX_DEATHS} worker processes died on the same unit of work",
        where=failed_units[0],
        why=f"all other units are done; {len(failed_units)} failed like this, e.g. out of memory",
        fix="the same command with --workers=1, which needs less memory",
    )
