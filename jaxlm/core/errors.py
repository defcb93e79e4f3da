"""Errors that a user can cause: what happened, where, why, and a fix to paste.

Each class has the exit code of `jaxlm`. Any other exception is a bug: exit 70 with a traceback.

Example:
    >>> why, fix = "it ends after 12 bytes", "jaxlm data fix shards"
    >>> error = DataError("a shard is cut off", where="shards/3", why=why, fix=fix)
    >>> print(error, error.code, sep=chr(10))
    data error: a shard is cut off
      where  shards/3
      why    it ends after 12 bytes
      fix    jaxlm data fix shards
    65
"""

import errno
import functools
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.quoting import safe

FULL = (errno.ENOSPC, errno.EDQUOT)  # disk full: unlike other write errors, it may pass
CLOSED = (errno.EACCES, errno.EPERM)
FREE_SPACE = "free space there, then run the same command again"

EARLIER_STEP = "use an earlier --step, whose weights are finite"  # a fix for people


class JaxlmError(Exception):
    """A failure in four parts, each sanitized and at most 2 kB.

    Args:
      what: one line that states the failure.
      where: file and line, setting and who set it, or path on disk.
      why: the numbers that make it wrong.
      fix: command, flag or value to paste; several lines are allowed.
      every: a line for each failure, if there are many; `why` shows the first ones.
    """

    SHOWN = 5  # lines of `every` in `why`

    code = 70
    kind = "internal error"

    def __init_subclass__(cls, code: int | None = None, kind: str | None = None):
        cls.code, cls.kind = code or cls.code, kind or cls.kind

    def __init__(self, what: str, *, where: str, why: str, fix: str, every: Sequence[str] = ()):
        self.every = [safe(line) for line in every] if len(every) > self.SHOWN else []
        if every:
            more = [f"and {len(every) - self.SHOWN} more, listed above"] if self.every else []
            why = "\n".join([why, *every[: self.SHOWN], *more])
        self.what, self.where, self.why, self.fix = map(safe, (what, where, why, fix))
        super().__init__(self.what)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the constructor: errors also arrive from other processes."""
        make = functools.partial(type(self), where=self.where, why=self.why, fix=self.fix)
        return make, (self.what,), self.__dict__

    @property
    def parts(self) -> dict[str, str]:
        """Return the four parts by name, as the constructor takes them."""
        return {name: getattr(self, name) for name in ("what", "where", "why", "fix")}

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.what}"]
        for label in ("where", "why", "fix"):
            for number, line in enumerate(getattr(self, label).splitlines()):
                lines.append(f"  {'' if number else label:<6} {line}")
        return "\n".join(lines)


class CommandError(JaxlmError, code=2, kind="command error"):
    """The command line is wrong."""


class ConfigError(JaxlmError, code=2, kind="config error"):
    """A setting is unknown, has the wrong type, is out of range or contradicts another."""


class DataError(JaxlmError, code=65, kind="data error"):
    """Data or a checkpoint is damaged or invalid."""


class InputMissing(JaxlmError, code=66, kind="input missing"):
    """A file, or a match of a glob, is missing."""


class PeerLost(JaxlmError, code=69, kind="peer lost"):
    """Another process of the run, or the coordinator, is missing or does not respond."""


class OutOfMemory(JaxlmError, code=71, kind="out of memory"):
    """The run does not fit in memory."""


class NotWritable(JaxlmError, code=73, kind="output not writable"):
    """An output path cannot be written."""


def listed(items: Sequence[str], lines: int) -> str:
    """Return the items joined into at most `lines` lines: an error has eight lines in all."""
    width = max(-(-len(items) // lines), 1)
    return "\n".join("; ".join(items[i : i + width]) for i in range(0, len(items), width))


def not_installed(what: str, package: str, extra: str, *, where: str) -> InputMissing:
    """Return the error of a missing library that an extra of jaxlm installs."""
    why = f"it is not installed in {sys.prefix}"
    return InputMissing(f"{what} needs {package}", where=where, why=why, fix=installs(extra))


def installs(extra: str) -> str:
    """Return the command that installs an extra of jaxlm into the running environment."""
    return f"{shlex.quote(sys.executable)} -m pip install 'jaxlm[{extra}]'"


ANOTHER = "--workdir=runs/another"  # begins another run


def cannot_write(what: str, place: object, error: OSError, *, fix: str = ANOTHER) -> NotWritable:
    """Return the error of a write that the operating system refused."""
    why = f"{type(error).__name__}: {error.strerror}"
    return NotWritable(f"{what} cannot be written", where=str(place), why=why, fix=fix)


class SaveFailed(JaxlmError, code=74, kind="save failed"):
    """A checkpoint could not be committed, or the disk has no space for a run's records."""


def cannot_keep(what: str, place: object, error: OSError) -> SaveFailed | NotWritable:
    """Return the error of a refused write of a run: SaveFailed if the disk is full."""
    refused = cannot_write(what, place, error)
    if error.errno not in FULL:
        return refused
    return SaveFailed(refused.what, where=refused.where, why=refused.why, fix=FREE_SPACE)


class Preempted(JaxlmError, code=75, kind="preempted"):
    """The run was asked to stop, has saved its state and can be restarted."""


class Stalled(JaxlmError, code=76, kind="stalled"):
    """The run made no progress for longer than the time limit of its phase."""


class InUse(JaxlmError, code=77, kind="run directory in use"):
    """Another process uses the run directory."""


class Diverged(JaxlmError, code=79, kind="diverged"):
    """The loss or a gradient is not finite, and the budget of skips and rewinds is spent."""


def as_jaxlm_error(error: BaseException, verb: str = "train") -> JaxlmError | None:
    """Return a library's error as a JaxlmError, None for a bug; `verb` is the command that ran."""
    if isinstance(error, JaxlmError):
        return error
    if isinstance(error, OSError) and error.filename is not None:
        return _of_path(error)
    is_on_host = isinstance(error, MemoryError)
    if not is_on_host and not is_out_of_memory(error):
        return None
    fix = "use a smaller model, batch or length"
    if verb == "train":
        fix = "--config.train.remat=dots\n--config.train.microbatches=2    # or more than now"
    where, why = "the host" if is_on_host else "a device", str(error).partition("\n")[0]
    what = "the program ran out of memory"
    return OutOfMemory(what, where=where, why=why or type(error).__name__, fix=fix)


def _of_path(error: OSError) -> InputMissing | None:
    """Return the error of a path that the operating system refuses; None for other errors."""
    path, why = os.fsdecode(error.filename), f"{type(error).__name__}: {error.strerror}"
    if error.errno in CLOSED:
        folders = (each for each in reversed(Path(path).parents) if each.exists())
        closed = next((each for each in folders if not os.access(each, os.X_OK)), path)
        fix = f"ls -ld {shlex.quote(str(closed))}"
        return InputMissing("this process has no permission", where=path, why=why, fix=fix)
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        fix = "name the file that has the text"
        return InputMissing("this is not the path of a file", where=path, why=why, fix=fix)
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if JAX reports, in the text alone, that a device is out of memory."""
    text = str(error).partition("\n")[0].lower()
    signs = ("resource_exhausted", "out of memory")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)
