"""Ask a person which of two answers is better, in a terminal; each key is saved at once.

Keys: 1 and 2 choose, t is a tie, s skips, u takes the last choice back, q ends.
"""

import contextlib
import os
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core import disk
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, cannot_keep
from jaxlm.core.quoting import printable
from jaxlm.monitor import sinks
from jaxlm.recipes.rate.texts import SHAPE, TextPair, rating

CHOICES = {"1": "a", "2": "b", "t": "tie", "s": "skip"}
UNDO, END = "u", ("q", "\x03", "\x04", "")  # Ctrl-C and Ctrl-D end too
HELP = "1 or 2 is better, t tie, s skip, u undo, q quit"


def ask(
    pairs: Sequence[tuple[TextPair, Any]],
    name: str,
    file: Path,
    rater: str,
    *,
    read_key: Callable[[], str],
    say: Log,
) -> int:
    """Ask for each pair that the file has no rating of, and return the number of ratings.

    Args:
      pairs: the texts, and the messages of the prompt, or its text.
      name: RUN@STEP of the run that wrote both answers.
      file: ratings.jsonl, which is written after each key.
      rater: name of the person.
      read_key: returns the next key that is pressed.
      `say`: receives what is shown.

    Raises:
      NotWritable, SaveFailed: if the file cannot be written.
    """
    records = list(sinks.read(file, SHAPE))
    known = {each["id"] for each in records}
    waiting = [each for each in pairs if each[0].id not in known and each[0].a != each[0].b]
    place = 0
    while place < len(waiting):
        pair, prompt = waiting[place]
        parts = [f"prompt\n{pair.prompt}", f"1\n{pair.a}", f"2\n{pair.b}"]
        head = f"{len(records) + 1} of {len(records) + len(waiting) - place}"
        say("\n\n".join([f"--- {head}", *map(printable, parts), HELP]))
        begun, key = time.monotonic(), read_key().lower()
        if key in END:
            break
        if key == UNDO and place:
            records.pop()
            place -= 1
        elif key in CHOICES:
            record = rating(pair, (name, name), "ab", CHOICES[key], rater)
            record["seconds"] = round(time.monotonic() - begun, 3)
            for side in ("chosen", "rejected"):
                if side in record and not isinstance(prompt, str):
                    answer = {"role": "assistant", "content": record[side]}
                    record[side] = [*prompt, answer]
            records.append(record)
            place += 1
        else:
            continue
        try:
            disk.replace(file, "".join(map(sinks.line, records)).encode())
        except OSError as error:
            raise cannot_keep(file.name, file, error) from error
    return len(records)


@contextlib.contextmanager
def keys(descriptor: int | None = None) -> Iterator[Callable[[], str]]:
    """Yield the function that returns the next key of a terminal, without waiting for a line end.

    Raises:
      CommandError: if it is no terminal.
    """
    if not (sys.stdin.isatty() if descriptor is None else os.isatty(descriptor)):
        raise CommandError(
            "a person is asked in a terminal",
            where="--ask",
            why="standard input is no terminal",
            fix="run the same command in a terminal",
        )
    number = sys.stdin.fileno() if descriptor is None else descriptor
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield lambda: os.read(number, 1).decode(errors="replace")
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
