"""Errors of a call from Python: flags of the command line become arguments of the call.

Example:
  >>> in_python("--config.optim.lr=1e-3 --config.data.kind=chat    # conversations")
  "settings={'optim.lr': 0.001, 'data.kind': 'chat'}    # conversations"
  >>> in_python("--cast --allow_change=optim.lr")
  "resume=jaxlm.ResumeOptions(cast=True, allow_change=('optim.lr',))"
"""

import ast
import contextlib
import re
import shlex
from collections.abc import Iterator
from typing import Any

from jaxlm.core.errors import JaxlmError

ARGUMENTS = ("workdir", "init_from", "stop_at", "cpu_devices")  # flags that `train` has too
RESUME = ("start_at", "force", "reset_optimizer", "cast", "allow_change")  # of jaxlm.ResumeOptions
FLAG = re.compile(r"--(config\.)?([\w.]+)(?:=(.*))?", re.DOTALL)
COMMENT = re.compile(r"\s{2,}# .*$")


@contextlib.contextmanager
def python_errors() -> Iterator[None]:
    """Raise an error whose place and fix are arguments, where they are flags."""
    try:
        yield
    except JaxlmError as error:
        for part in ("where", "fix"):
            lines = getattr(error, part).split("\n")
            setattr(error, part, "\n".join(map(in_python, lines)))
        error.why = error.why.replace("--config.", "")
        raise


def in_python(line: str) -> str:
    """Return a line of flags as arguments of `jaxlm.train`; any other line as it is."""
    match = COMMENT.search(line)
    comment = match[0] if match else ""
    try:
        words = shlex.split(line.removesuffix(comment))
    except ValueError:  # text with one quotation mark
        return line
    settings: dict[str, Any] = {}
    arguments, resume = [], []
    for word in words:
        flag = FLAG.fullmatch(word)
        if not flag or (flag[3] is None and flag[2] not in RESUME):
            return line
        if flag[1]:
            settings[flag[2]] = _value(flag[3])
        elif flag[2] in ARGUMENTS:
            arguments.append(f"{flag[2]}={_value(flag[3])!r}")
        elif flag[2] == "allow_change":
            resume.append(f"allow_change={tuple((flag[3] or '').split(','))}")
        elif flag[2] in RESUME:
            resume.append(f"{flag[2]}={True if flag[3] is None else _value(flag[3])!r}")
        else:
            return line
    arguments = [f"settings={settings!r}", *arguments] if settings else arguments
    if resume:
        arguments.append(f"resume=jaxlm.ResumeOptions({', '.join(resume)})")
    return ", ".join(arguments) + comment if arguments else line


def _value(text: str) -> Any:
    """Return the value of a flag; a text is its own value, as settings are read like flags."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
