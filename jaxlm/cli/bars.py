"""Bars that fill while something long is done."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from jaxlm.cli.output import Output
from jaxlm.monitor.progress import Lines

LINE_SECONDS = 30.0  # between two lines of a log


@contextlib.contextmanager
def progress_bars(out: Output, doing: str = "") -> Iterator[Callable[[str, int, int], None]]:
    """A line on a terminal for each thing that is told, in bytes; in a log a new one now and then, of what takes long."""
    if out.quiet:
        yield lambda what, done, total: None
        return
    if not sys.stderr.isatty():
        yield Lines(out.say, doing, LINE_SECONDS)
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
