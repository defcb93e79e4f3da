"""Errors a user can cause: what happened, where, why, and a line to paste that mends it.

Each class carries the exit code that `jaxlm` ends with. Anything else that escapes is our bug: exit 70 with a traceback.
"""

import errno
import functools
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from jaxlm.core.quoting import safe

FULL = (
    errno.ENOSPC,
    errno.EDQUOT,
)  # a disk without space: that passes, unlike other reasons not to write


class JaxlmError(Exception):
    """A failure said in four parts. What they quote is made safe to show, and at most 2 kB each.

    Args:
      what: one line, what is wrong.
      where: the file and line, the setting and who set it, or the path on disk.
      why: the numbers that make it wrong.
      fix: a command, flag or value to paste; several lines are allowed.
      every: a line for each thing that is wrong, where `why` shows the first of many.
    """

    SHOWN = 5  # of them, in `why`

    code = 70
    kind = "internal error"

    def __init__(self, what: str, *, where: str, why: str, fix: str, every: Sequence[str] = ()):
        self.every = [safe(line) for line in every] if len(every) > self.SHOWN else []
        if every:
            more = [f"and {len(every) - self.SHOWN} more, listed above"] if self.every else []
            why = "\n".join([why, *every[: self.SHOWN], *more])
        self.what, self.where, self.why, self.fix = map(safe, (what, where, why, fix))
        super().__init__(self.what)

    def __reduce__(self) -> tuple[Any, ...]:
        """As it was made: errors come from other processes too."""
        make = functools.partial(type(self), where=self.where, why=self.why, fix=self.fix)
        return make, (self.what,), self.__dict__

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.what}"]
        for label in ("where", "why", "fix"):
            text = getattr(self, label)
            for number, line in enumerate(text.splitlines()):
                lines.append(f"  {label if number == 0 else '':<6} {line}")
        return "\n".join(lines)


class CommandError(JaxlmError):
    """The command line itself is wrong."""

    code = 2
    kind = "command error"


class ConfigError(JaxlmError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another."""

    code = 2
    kind = "config error"


class DataError(JaxlmError):
    """Data or a checkpoint holds something it must not."""

    code = 65
    kind = "data error"


class InputMissing(JaxlmError):
    """A file or a match of a glob that the run needs is not there."""

    code = 66
    kind = "input missing"


class PeerLost(JaxlmError):
    """Another process of the run, or the one that coordinates them, is not there or does not answer."""

    code = 69
    kind = "peer lost"


class OutOfMemory(JaxlmError):
    """The run does not fit the device."""

    code = 71
    kind = "out of memory"


class NotWritable(JaxlmError):
    """The output place cannot be written."""

    code = 73
    kind = "output not writable"


def listed(items: Sequence[str], lines: int) -> str:
    """All of them in so many lines, several to a line where they are more: an error has eight in all."""
    width = -(-len(items) // lines)
    return "\n".join("; ".join(items[at : at + width]) for at in range(0, len(items), width or 1))


def not_installed(what: str, package: str, extra: str, *, where: str) -> InputMissing:
    """That a library which an extra of jaxlm brings is not there."""
    return InputMissing(
        f"{what} needs {package}",
        where=where,
        why=f"it is not installed in {sys.prefix}",
        fix=installs(extra),
    )


def installs(extra: str) -> str:
    """The command that adds an extra of jaxlm to the environment that runs, activated or not."""
    return f"{shlex.quote(sys.executable)} -m pip install 'jaxlm[{extra}]'"


def cannot_write(
    what: str, place: object, error: OSError, *, fix: str = "--workdir=runs/another"
) -> NotWritable:
    """That the operating system refused to write something."""
    return NotWritable(
        f"{what} cannot be written",
        where=str(place),
        why=f"{type(error).__name__}: {error.strerror}",
        fix=fix,
    )


class SaveFailed(JaxlmError):
    """A checkpoint that was due could not be committed, or the disk has no space for what a run writes down."""

    code = 74
    kind = "save failed"


def cannot_keep(what: str, place: object, error: OSError) -> SaveFailed | NotWritable:
    """That the operating system refused to write something of a run: SaveFailed where it is for want of space."""
    if error.errno not in FULL:
        return cannot_write(what, place, error)
    return SaveFailed(
        f"{what} cannot be written",
        where=str(place),
        why=f"{type(error).__name__}: {error.strerror}",
        fix="free space there, then run the same command again",
    )


class Preempted(JaxlmError):
    """The run was told to stop, has saved, and wants to be started again."""

    code = 75
    kind = "preempted"


class Stalled(JaxlmError):
    """Nothing has moved for longer than the limit of what the run was doing."""

    code = 76
    kind = "stalled"


class InUse(JaxlmError):
    """Another process owns the run directory."""

    code = 77
    kind = "run directory in use"


class Diverged(JaxlmError):
    """The loss or a gradient is not a number and the budget to go on is spent."""

    code = 79
    kind = "diverged"


def in_our_words(error: BaseException, verb: str = "train") -> JaxlmError | None:
    """Return what a library or Python raised as an error that the user can mend; None if it is a bug.

    JAX raises the same class for most that goes wrong on a device, so its text has to tell.

    Args:
      error: what was raised.
      verb: the command that ran; only `train` takes the settings that save memory of a step.
    """
    if isinstance(error, JaxlmError):
        return error
    text = str(error).partition("\n")[0]
    if isinstance(error, MemoryError) or is_out_of_memory(error):
        return OutOfMemory(
            "there is not enough memory",
            where="the host" if isinstance(error, MemoryError) else "a device",
            why=text or type(error).__name__,
            fix="--config.train.remat=dots\n--config.train.microbatches=2    # or more than now"
            if verb == "train"
            else "use a smaller model, batch or length",
        )
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether JAX says that a device has not the memory."""
    text = str(error).partition("\n")[0]
    return isinstance(error, RuntimeError) and (
        "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    )
