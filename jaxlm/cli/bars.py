"""Bars that fill while something long is done."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxlm.cli.output import Output
from jaxlm.monitor import words

LINE_SECONDS = 30.0  # between two lines of a log


class _Lines:
    """What is done, how fast, and what time is left, as a line at most every LINE_SECONDS."""

    def __init__(self, out: Output, doing: str):
        self._out, self._doing = out, doing
        self._told = time.monotonic()
        self._begun: dict[str, tuple[float, int]] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        since, before = self._begun.setdefault(what, (now, done))
        if now - self._told < LINE_SECONDS or done >= total:
            return
        self._told = now
        line = f"{self._doing}{what}: {words.size(done)} of {words.size(total)}"
        if done > before:
            rate = (done - before) / (now - since)
            left = words.duration((total - done) / rate)
            line += f", {words.size(rate)} a second, {left} left"
        self._out.say(line)


@contextlib.contextmanager
def progress_bars(out: Output, doing: str = "") -> Iterator[Callable[[str, int, int], None]]:
    """A line on a terminal for each thing that is told, in bytes; in a log a new one now and then, of what takes long."""
    if out.quiet:
        yield lambda what, done, total: None
        return
    if not sys.stderr.isatty():
        yield _Lines(out, doing)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn(f"{doing}{{task.description}}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield show
