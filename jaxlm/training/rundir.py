"""The run directory: who owns it, what it was started with, how it ended."""

import json
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from jaxlm.core.errors import (
    ConfigError,
    InputMissing,
    NotWritable,
    SaveFailed,
    cannot_keep,
    in_our_words,
)
from jaxlm.core.quoting import safe
from jaxlm.monitor import sinks
from jaxlm.monitor.sinks import AppendFile, Jsonl
from jaxlm.training.lock import Lock

IMPORTED = "imported.json"  # in a run whose weights came from elsewhere
EPILOGUE_SECONDS = 5.0  # who stopped the run may kill it soon
REFUSALS = {ConfigError.code, InputMissing.code}  # of the command, not of the run


class RunDir:
    """A directory that one process at a time may write.

    Use it as a context manager: it holds an exclusive lock while it is open, and leaves `exit.json` behind, whatever the
    way out but one that leaves no time for it: then there is none, as while a run goes on. Who does not get the lock writes
    nothing. Nor does who is refused before `begin` where a run was before: how that ended stays as it is told.

    Where a run has several processes, one writes: for the others nothing here takes or leaves anything.
    """

    def __init__(self, path: str | os.PathLike[str], *, is_writer: bool = True):
        self.path, self.is_writer = Path(path), is_writer
        self.step = 0  # the newest completed step, for exit.json
        self.has_begun = False
        self.outcome = "finished"  # the cause in exit.json, where nothing went wrong
        # Frees what may be freed on a full disk; set by whoever saves here.
        self.make_room: Callable[[], None] = lambda: None
        # What else tells how it ended, where that was not well; done in haste, and left out where it fails.
        self.epilogue: Callable[[], object] = lambda: None
        self.lock = Lock(self.path / "lock")

    def __enter__(self) -> Self:
        """Creates and locks the directory.

        Raises:
          SaveFailed: where the disk is full.
          NotWritable: where it cannot be created or written for another reason.
          InUse: where another process holds it.
        """
        if not self.is_writer:
            return self
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock.acquire()
        except OSError as error:
            raise cannot_keep("the run directory", self.path, error) from error
        return self

    def begin(self) -> None:
        """From here on the directory changes: how the last start ended is no longer how the run did. Raises as `write` does."""
        self.has_begun = True
        if self.is_writer:
            last = self.path / "exit.json"
            try:
                last.unlink(missing_ok=True)
            except OSError as error:
                raise cannot_keep("exit.json", last, error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        try:
            self.leave(_code(error), self.outcome if error is None else cause(error))
            if error is not None:
                self.conclude()
        except (NotWritable, SaveFailed):
            if (
                error is None
            ):  # else what went wrong first is told, and not that it could not be written down
                raise
        finally:
            self.lock.release()

    def leave(self, code: int, cause: str) -> None:
        """Writes exit.json: how this process ended, or is about to. One that says that the run finished at this step stays."""
        if not self.has_begun and code in REFUSALS and not self.is_new:
            return
        record = {"code": code, "step": self.step, "cause": cause}
        if code == 0 and self._last_words() == record:
            return
        self.write_json("exit.json", record | {"time_unix": time.time()})

    def conclude(self) -> None:
        """Does the epilogue of a run that has begun, or as much of it as there is time for."""
        if self.is_writer and self.has_begun:
            from jaxlm.training.shutdown import run_with_timeout  # imports JAX: only a run needs it

            run_with_timeout(self.epilogue, EPILOGUE_SECONDS)

    def _last_words(self) -> dict[str, Any] | None:
        """exit.json without its time; None where there is none that can be read."""
        try:
            found = json.loads((self.path / "exit.json").read_text())
            return {name: value for name, value in found.items() if name != "time_unix"}
        except (OSError, ValueError, AttributeError, RecursionError):
            return None

    def write(self, name: str, text: str) -> None:
        """Replaces a text file as a whole: readers see the old text or the new."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Replaces a file as a whole. Raises SaveFailed where the disk is full, NotWritable where it cannot otherwise."""
        if self.is_writer:
            sinks.replace(self.path / name, content)

    def append(self, name: str) -> AppendFile:
        """Opens a text file, to add to it. Raises as `write` does; that the disk is full is said once room could not be made."""
        return AppendFile(self.path / name, make_room=lambda: self.make_room())

    def journal(self, name: str, *, keep_through: int | None = None) -> Jsonl:
        """Opens a file of records, to add to it, as `append` does."""
        return Jsonl(
            self.path / name, keep_through=keep_through, make_room=lambda: self.make_room()
        )

    def write_json(self, name: str, value: Any) -> None:
        """Replaces a JSON file as a whole."""
        self.write(name, json.dumps(value, indent=1, allow_nan=False) + "\n")

    def write_command(self, arguments: list[str]) -> None:
        """Writes command.sh, the one line that repeats the run."""
        self.write("command.sh", f"#!/bin/sh\njaxlm {shlex.join(arguments)}\n")

    @property
    def is_new(self) -> bool:
        """Whether no run has begun here before."""
        return not (self.path / "config.json").exists()

    @property
    def checkpoints(self) -> Path:
        """Where the committed steps are."""
        return self.path / "checkpoints"


def _code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if known := in_our_words(error):
        return known.code
    return 130 if isinstance(error, KeyboardInterrupt) else 70


def cause(error: BaseException) -> str:
    """Why something ended, as exit.json says it."""
    return f"{type(error).__name__}: {safe(str(getattr(error, 'what', error)))}"


def read_json(run: str | os.PathLike[str], name: str) -> Any:
    """A JSON file of a run directory.

    Raises:
      InputMissing: where the run has no such file.
      DataError: where it is not JSON.
    """
    path = Path(run) / name
    if not path.exists():
        raise InputMissing(
            f"there is no {name} in the run directory",
            where=str(path),
            why="`jaxlm train` and `jaxlm import` write it",
            fix=f"find . -name {name}",
        )
    return sinks.read_json(path)
