"""Errors a user can cause: what happened, where, why, and a line to paste that mends it.

Each class carries the exit code that `jaxlm` ends with. Anything else that escapes is our bug: exit 70 with a traceback.
"""


class JaxlmError(Exception):
    """A failure said in four parts.

    Args:
      what: one line, what is wrong.
      where: the file and line, the setting and who set it, or the path on disk.
      why: the numbers that make it wrong.
      fix: a command, flag or value to paste; several lines are allowed.
    """

    code = 70
    kind = "internal error"

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = ""):
        super().__init__(what)
        self.what, self.where, self.why, self.fix = what, where, why, fix

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


class OutOfMemory(JaxlmError):
    """The run does not fit the device."""

    code = 71
    kind = "out of memory"


class NotWritable(JaxlmError):
    """The output place cannot be written."""

    code = 73
    kind = "output not writable"


class SaveFailed(JaxlmError):
    """A checkpoint that was due could not be committed."""

    code = 74
    kind = "save failed"


class Preempted(JaxlmError):
    """The run was told to stop, has saved, and wants to be started again."""

    code = 75
    kind = "preempted"


class InUse(JaxlmError):
    """Another process owns the run directory."""

    code = 77
    kind = "run directory in use"


class Diverged(JaxlmError):
    """The loss or a gradient is not a number and the budget to go on is spent."""

    code = 79
    kind = "diverged"
