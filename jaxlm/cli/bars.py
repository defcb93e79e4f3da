"""Progress bars of long commands."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from jaxlm.cli.output import Output
from jaxlm.core.callbacks import OnProgress
from jaxlm.monitor.formatting import ProgressLines

LINE_SECONDS = 30.0  # between two lines of a log


@contextlib.contextmanager
def progress_bars(out: Output, doing: str = "") -> Iterator[OnProgress]:
    """Yield a callback that shows a bar per label on a terminal, or periodic lines in a log."""
    if out.quiet:
        yield lambda what, done, total: None
        return
    if not sys.stderr.isatty():
        yield ProgressLines(out.log, doing, LINE_SECONDS)
        return
    from rich import progress as rich
    from rich.console import Console

    numbers = (rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
    columns = (rich.TextColumn(f"{doing}{{task.description}}"), rich.BarColumn(), *numbers)
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield show
