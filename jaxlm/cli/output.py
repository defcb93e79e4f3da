"""What a verb says to a person, and what it answers to a program."""

import json
import math
import os
import sys
from typing import Any, TextIO

from jaxlm.core.errors import JaxlmError
from jaxlm.core.quoting import printable


class Output:
    """Text for people on stdout; under `--json`, one object on stdout and the text on stderr.

    A reader that has gone away (`| head`) does not stop a verb: what is left to say goes nowhere.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False):
        self.as_json, self.quiet = as_json, quiet

    def say(self, text: str) -> None:
        """Progress and remarks; nothing under `--quiet`."""
        if not self.quiet:
            write(sys.stderr if self.as_json else sys.stdout, text)

    def result(self, answer: dict[str, Any], text: str) -> None:
        """The answer, once: the object under `--json`, else the text."""
        write(sys.stdout, to_line(answer) if self.as_json else text)

    def part(self, text: str) -> None:
        """A part of the answer for people that goes on where the part before it ended."""
        write(sys.stdout, text, end="")

    def error(self, error: JaxlmError) -> None:
        """The four parts on stderr, after a list of what is too much for them; under `--json` also as an object on stdout."""
        for line in error.every:
            write(sys.stderr, line)
        write(sys.stderr, str(error))
        if self.as_json:
            parts = {
                name: getattr(error, name)
                for name in ("what", "where", "why", "fix", "kind", "code")
            }
            every = {"every": error.every} if error.every else {}
            write(sys.stdout, to_line({"error": parts | every}))


def write(stream: TextIO, text: str, end: str = "\n") -> None:
    """A line to a stream, control characters spelt out, or to nobody where its reader has gone."""
    try:
        print(printable(text), file=stream, end=end, flush=True)
    except BrokenPipeError:
        abandon(stream)


def abandon(stream: TextIO) -> None:
    """Points a broken stream at nothing, so that neither later text nor the interpreter's last flush fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def to_line(answer: dict[str, Any]) -> str:
    """JSON on one line. JSON has no NaN and no infinity: they become null."""
    return json.dumps(_jsonable(answer), allow_nan=False)


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _jsonable(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return _jsonable(value.tolist()) if hasattr(value, "tolist") else str(value)
