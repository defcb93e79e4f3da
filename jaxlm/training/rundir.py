"""The run directory: its lock, its files, and exit.json."""

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
    as_jaxlm_error,
    cannot_keep,
)
from jaxlm.core.quoting import safe
from jaxlm.monitor import sinks
from jaxlm.monitor.sinks import AppendFile, Jsonl
from jaxlm.training.lock import Lock

COMMAND = "command.sh"
IMPORTED = "imported.json"  # in a run directory with imported weights
# The history: each start of a run is kept for good. A step is replayed under the start that made
# it; the newest start is not enough for that, and checkpoints are removed.
STARTS_FILE = "starts.jsonl"
OF_A_RUN = ("config.json", "lock", "exit.json", "checkpoints", COMMAND)
REPORT_SECONDS = 5.0  # timeout: a scheduler that stopped the run may kill it soon
REFUSALS = {ConfigError.code, InputMissing.code}  # exit codes of a refused command


def split_ref(ref: str) -> tuple[Path, str | None]:
    """Return the run directory and the step of RUN[@STEP], as typed; None without a step.

    Example:
      >>> split_ref("runs/a@500"), split_ref("runs/a")
      ((PosixPath('runs/a'), '500'), (PosixPath('runs/a'), None))
    """
    path, _, step = ref.rpartition("@")
    return (Path(path), step) if path else (Path(ref), None)


def other_files(path: Path) -> list[str]:
    """Return the names of files in a folder that is no run directory; none in that of a run."""
    try:
        if not path.is_dir() or any((path / name).exists() for name in OF_A_RUN):
            return []
        return sorted(each.name for each in path.iterdir() if not each.name.startswith("."))
    except OSError:  # `RunDir` has the error of a folder that cannot be used
        return []


class RunDir:
    """A directory that one process at a time may write.

    As a context manager it holds an exclusive lock and writes `exit.json` at the end. Only a
    process that is killed leaves no `exit.json`, like a run in progress. A process without the lock
    writes no file. A process that is refused before `begin()` leaves the previous `exit.json`
    untouched.

    In a run of several processes one is the writer; for the others no method writes or locks.
    """

    def __init__(self, path: str | os.PathLike[str], *, is_writer: bool = True):
        self.path, self.is_writer = Path(path), is_writer
        self.step = 0  # the newest completed step, for exit.json
        self.has_begun = False
        self.outcome = "finished"  # the cause in exit.json if no error occurred
        # Deletes spare files on a full disk; set by the checkpoint saver.
        self.make_room: Callable[[], None] = lambda: None
        # Writes the report of a failed run; it has a timeout, and its errors are ignored.
        self.report: Callable[[], object] = lambda: None
        self.lock = Lock(self.path / "lock")

    def __enter__(self) -> Self:
        """Create and lock the directory.

        Raises:
          SaveFailed: if the disk is full.
          NotWritable: if the directory cannot be created or written for another reason.
          InUse: if another process holds the lock.
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
        """Delete exit.json of the last start: the run changes from now on. Raises as `write`."""
        self.has_begun = True
        if self.is_writer:
            last = self.path / "exit.json"
            try:
                last.unlink(missing_ok=True)
            except OSError as error:
                raise cannot_keep("exit.json", last, error) from error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.write_exit(_code(error), self.outcome if error is None else cause(error))
            if error is not None:
                self.write_report()
        except (NotWritable, SaveFailed):
            if error is None:  # otherwise the first error is raised
                raise
        finally:
            self.lock.release()

    def write_exit(self, code: int, cause: str) -> None:
        """Write exit.json; an existing one of a run that finished at this step stays."""
        if not self.has_begun and code in REFUSALS and not self.is_new:
            return
        record = {"code": code, "step": self.step, "cause": cause}
        if code == 0 and self._read_exit() == record:
            return
        self.write_json("exit.json", record | {"time_unix": time.time()})

    def write_report(self) -> None:
        """Write the report of a run that has begun, within a timeout."""
        if self.is_writer and self.has_begun:
            from jaxlm.training.shutdown import run_with_timeout  # imports JAX: only a run needs it

            run_with_timeout(self.report, REPORT_SECONDS)

    def _read_exit(self) -> dict[str, Any] | None:
        """Return exit.json without its time, or None if it is missing or damaged."""
        try:
            record = json.loads((self.path / "exit.json").read_text())
            return {name: value for name, value in record.items() if name != "time_unix"}
        except (OSError, ValueError, AttributeError, RecursionError):
            return None

    def write(self, name: str, text: str) -> None:
        """Replace a text file atomically: readers see the old text or the new."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Replace a file atomically.

        Raises:
          SaveFailed: if the disk is full.
          NotWritable: if the file cannot be written for another reason.
        """
        if self.is_writer:
            sinks.replace(self.path / name, content)

    def append(self, name: str) -> AppendFile:
        """Open a text file for appending. Raises as `write`; on a full disk after `make_room`."""
        return AppendFile(self.path / name, make_room=lambda: self.make_room())

    def journal(self, name: str, *, keep_through: int | None = None) -> Jsonl:
        """Open a JSON Lines file for appending, as `append` does."""
        return Jsonl(
            self.path / name, keep_through=keep_through, make_room=lambda: self.make_room()
        )

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file atomically."""
        self.write(name, json.dumps(value, indent=1, allow_nan=False) + "\n")

    def copy_folder(self, source: Path, name: str) -> None:
        """Copy the files of a folder into one of this directory. Raises as `write_bytes`."""
        for file in sorted(source.rglob("*")):
            if file.is_file() and self.is_writer:
                target = self.path / name / file.relative_to(source)
                try:
                    target.parent.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise cannot_keep("a folder", target.parent, error) from error
                sinks.replace(target, file.read_bytes())

    def write_command(self, arguments: list[str]) -> None:
        """Write command.sh, the command that repeats the run.

        One without --config only resumes the run, and replaces no other command.
        """
        has_config = any(each.partition("=")[0] == "--config" for each in arguments)
        if has_config or not (self.path / COMMAND).exists():
            self.write(COMMAND, f"#!/bin/sh\njaxlm {shlex.join(arguments)}\n")

    @property
    def is_new(self) -> bool:
        """True if the directory contains no run yet."""
        return not (self.path / "config.json").exists()

    @property
    def checkpoints(self) -> Path:
        """Folder of the committed steps."""
        return self.path / "checkpoints"


def _code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if known := as_jaxlm_error(error):
        return known.code
    return 130 if isinstance(error, KeyboardInterrupt) else 70


def cause(error: BaseException) -> str:
    """Return the cause of an exit, as in exit.json."""
    return f"{type(error).__name__}: {safe(str(getattr(error, 'what', error)))}"


def imported_facts(run: Path) -> dict[str, Any]:
    """Return the facts of an import, of a merge, a pruning or a rounding; empty for a trained run.

    Raises DataError if the file is not JSON.
    """
    return sinks.read_json(run / IMPORTED) if (run / IMPORTED).is_file() else {}


def read_json(run: str | os.PathLike[str], name: str) -> Any:
    """Read a JSON file of a run directory.

    Raises:
      InputMissing: if the run has no such file.
      DataError: if the file is not JSON.
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
