"""The run directory: who owns it, what it was started with, how it ended."""

import fcntl
import json
import os
import shlex
import socket
import time
from pathlib import Path
from typing import Any, Self

from jaxlm.core.errors import InputMissing, InUse, JaxlmError, NotWritable


class RunDir:
    """A directory that one process at a time may write.

    Use it as a context manager: it holds an exclusive lock while it is open. Once `begin` is called it also leaves
    `exit.json` behind, whatever the way out; until then nothing but the lock is written.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.step = 0  # the newest completed step, for exit.json
        self._begun = False
        self._lock: int | None = None

    def begin(self) -> None:
        """From here on the run leaves its mark."""
        self._begun = True

    def __enter__(self) -> Self:
        """Creates and locks the directory.

        Raises:
          NotWritable: where it cannot be created or written.
          InUse: where another process holds it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise NotWritable(
                "the run directory cannot be written",
                where=str(self.path),
                why=f"{type(error).__name__}: {error.strerror}",
                fix="--workdir=runs/another, or change its permissions",
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(self._lock, 4096).decode(errors="replace").strip()
            os.close(self._lock)
            self._lock = None
            raise InUse(
                "another process is using this run directory",
                where=str(self.path),
                why=owner or "its owner has not written its name yet",
                fix="wait for it, or use another --workdir",
            ) from error
        os.ftruncate(self._lock, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        os.pwrite(
            self._lock, f"pid {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        try:
            if self._begun:
                self.write_json(
                    "exit.json",
                    {
                        "code": _code(error),
                        "step": self.step,
                        "cause": _cause(error),
                        "time_unix": time.time(),
                    },
                )
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def write(self, name: str, text: str) -> None:
        """Replaces a text file as a whole: readers see the old text or the new."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Replaces a file as a whole."""
        target = self.path / name
        partial = target.with_name(f".{name}.{os.getpid()}.tmp")
        try:
            with open(partial, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise NotWritable(
                f"{name} cannot be written",
                where=str(target),
                why=f"{type(error).__name__}: {error.strerror}",
            ) from error

    def write_json(self, name: str, value: Any) -> None:
        """Replaces a JSON file as a whole."""
        self.write(name, json.dumps(value, indent=1, allow_nan=False) + "\n")

    def write_command(self, arguments: list[str]) -> None:
        """Writes command.sh, the one line that repeats the run."""
        self.write("command.sh", f"#!/bin/sh\njaxlm {shlex.join(arguments)}\n")

    @property
    def checkpoints(self) -> Path:
        """Where the committed steps are."""
        return self.path / "checkpoints"


def _code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, JaxlmError):
        return error.code
    return 130 if isinstance(error, KeyboardInterrupt) else 70


def _cause(error: BaseException | None) -> str:
    return (
        "finished" if error is None else f"{type(error).__name__}: {getattr(error, 'what', error)}"
    )


def read_json(run: str | os.PathLike[str], name: str) -> Any:
    """A JSON file of a run directory.

    Raises:
      InputMissing: where the run has no such file.
    """
    path = Path(run) / name
    if not path.exists():
        raise InputMissing(
            f"there is no {name} in the run directory",
            where=str(path),
            fix="name a directory that `jaxlm train` made with --workdir",
        )
    return json.loads(path.read_text(encoding="utf-8"))
