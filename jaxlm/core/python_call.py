"""Errors of a call from Python: flags of the command line become arguments of the call.

Example:
  >>> in_python("--config.optim.lr=1e-3 --config.data.kind=chat    # conversations")
  "settings={'optim.lr': 0.001, 'data.kind': 'chat'}    # conversations"
"""

import ast
import contextlib
import re
import shlex
from collections.abc import Iterator
from typing import Any

from jaxlm.core.errors import JaxlmError

ARGUMENTS = ("workdir", "init_from", "stop_at", "cpu_devices")  # flags that `train` has too
FLAG = re.compile(r"--(config\.)?([\w.]+)=(.*)", re.DOTALL)
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
    arguments = []
    for word in words:
        flag = FLAG.fullmatch(word)
        if flag and flag[1]:
            settings[flag[2]] = _value(flag[3])
        elif flag and flag[2] in ARGUMENTS:
            arguments.append(f"{flag[2]}={_value(flag[3])!r}")
        else:
            return line
    arguments = [f"settings={settings!r}", *arguments] if settings else arguments
    return ", ".join(arguments) + comment if arguments else line


def _value(text: str) -> Any:
    """Return the value of a flag; a text is its own value, as settings are read like flags."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
