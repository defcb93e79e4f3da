"""Output of a verb: text for people, JSON for programs, errors."""

import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from jaxlm.cli.arguments import free_workdir
from jaxlm.core.errors import ANOTHER, JaxlmError
from jaxlm.core.quoting import printable
from jaxlm.monitor import formatting

BOLD, RED, GREEN, DIM = "1", "1;31", "32", "2"  # parameters of an escape sequence


class Output:
    """Text for people on stdout; under `--json`, one object on stdout and the text on stderr.

    A closed reader (`| head`) does not stop a verb: the remaining output is dropped.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False):
        self.as_json, self.quiet = as_json, quiet

    def log(self, text: str) -> None:
        """Print progress or a remark; nothing under `--quiet`."""
        if not self.quiet:
            write(sys.stderr if self.as_json else sys.stdout, text)

    def result(self, answer: dict[str, Any], text: str | list[str], code: int = 0) -> int:
        """Print the result, once: the object under `--json`, else the text. Returns `code`."""
        shown = text if isinstance(text, str) else "\n".join(text)
        write(sys.stdout, to_line(answer) if self.as_json else shown)
        return code

    def stream(self, text: str) -> None:
        """Print the next part of a result, without a line end."""
        write(sys.stdout, text, end="")

    def error(self, error: JaxlmError, flag: str = "--workdir") -> None:
        """Print an error on stderr; under `--json` also as an object on stdout.

        `flag` names the run directory that the command writes.
        """
        if ANOTHER in error.fix:
            free = free_workdir("another").replace("--workdir", flag, 1)
            error.fix = error.fix.replace(ANOTHER, free)
        for line in error.every:
            write(sys.stderr, line)
        first, *rest = str(error).split("\n")
        write(sys.stderr, first, style=RED)
        label = ""
        for line in rest:
            label = line[:8].strip() or label
            style = {"fix": GREEN, "why": DIM, "where": DIM}.get(label, "")
            if label == "why" and sys.stderr.isatty():
                line = formatting.wrapped(line, shutil.get_terminal_size().columns, 9)
            write(sys.stderr, line, style=style)
        if self.as_json:
            parts = error.parts | {"kind": error.kind, "code": error.code}
            every = {"every": error.every} if error.every else {}
            write(sys.stdout, to_line({"error": parts | every}))


def has_color(stream: TextIO) -> bool:
    """Return True for a terminal with colors. NO_COLOR turns them off; see https://no-color.org."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    return not is_plain and stream.isatty()


def write(stream: TextIO, text: str, end: str = "\n", style: str = "") -> None:
    """Write text to a stream, control characters escaped; drop it if the reader has gone.

    `style` is BOLD, RED, GREEN or DIM, for a terminal only.
    """
    shown = printable(text)
    if style and has_color(stream):
        shown = f"\x1b[{style}m{shown}\x1b[0m"
    try:
        print(shown, file=stream, end=end, flush=True)
    except BrokenPipeError:
        abandon(stream)


def abandon(stream: TextIO) -> None:
    """Redirect a broken stream to the null device, so that later flushes do not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def to_line(answer: dict[str, Any]) -> str:
    """Return JSON on one line. JSON has no NaN and no infinity: they become null."""
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


def columns(rows: Sequence[Sequence[str]], aligned: str = "") -> list[str]:
    """Return rows of cells in columns: right-aligned, or by one of "<>" in `aligned` per column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = list(zip(aligned.ljust(len(widths), ">"), widths, strict=True))

    def line(row: Sequence[str]) -> str:
        padded = (f"{c:{side}{width}}" for c, (side, width) in zip(row, cells, strict=True))
        return "  ".join(padded).rstrip()

    return list(map(line, rows))


def table(rows: list[tuple[str, str]]) -> list[str]:
    """Return rows of a label and a text; a label equal to the one above is left out.

    Texts are wrapped at the width of a terminal; those with flags remain whole, to be pasted.
    """
    labels = ["", *(label for label, _ in rows)]
    pairs = zip(rows, labels, strict=False)
    lines = [f"{'' if label == above else label:<11}{text}" for (label, text), above in pairs]
    if not sys.stdout.isatty():
        return lines
    width = shutil.get_terminal_size().columns
    return [part for line in lines for part in formatting.wrapped(line, width, 11).split("\n")]
