"""Console output of a run: a header, a row per logged step, a closing block."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TextIO

from rich.console import Console as Screen
from rich.progress import BarColumn, Progress, TextColumn

from jaxlm.core.quoting import printable
from jaxlm.monitor import formatting
from jaxlm.monitor.sinks import AppendFile, NullSink, Record, Sink

HEAD_EVERY = 30  # rows between column heads, so that they are always on the screen


class Column(NamedTuple):
    """A column of the rows: head, width, field of the record, and formatter of its value."""

    head: str
    width: int
    field: str
    show: Callable[[Any], str]


def _three(value: float | None) -> str:
    return formatting.number(value, 3)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


COLUMNS = (
    Column("step", 8, "step", str),
    Column("loss", 8, "loss_nats", _loss),
    Column("eval", 8, "loss_nats", _loss),
    Column("lr", 9, "learning_rate", _three),
    Column("grad", 7, "grad_norm", _three),
    Column("tok/s", 7, "tokens_per_second", formatting.count),
    Column("mfu", 6, "mfu", lambda v: "-" if v is None else f"{v:.1%}"),
    Column("mem", 9, "peak_bytes", formatting.size),
    Column("data wait", 9, "data_wait_seconds", lambda v: "-" if v is None else f"{v * 1e3:.1f}ms"),
    Column("elapsed", 8, "elapsed_seconds", formatting.duration),
    Column("left", 8, "left_seconds", formatting.duration),
)


class Console(contextlib.AbstractContextManager["Console"]):
    """Prints records as rows on a screen, if any; on a terminal with a bar below, up to `total`.

    The file `log` gets the same lines without colors.
    """

    def __init__(self, screen: TextIO | None, *, log: AppendFile | None = None, total: int):
        # A notebook requests color in its environment but is no terminal: a bar would leave a line
        # for each frame.
        plain: Any = dict(force_jupyter=False, highlight=False, emoji=False, soft_wrap=True)
        self._screen: Screen | None = None
        self._is_live = False
        if screen:
            self._screen = Screen(file=screen, force_terminal=screen.isatty(), **plain)
            self._is_live = self._screen.is_terminal and not self._screen.is_dumb_terminal
        self._log, self._total, self._rows = log, total, 0
        self._warnings: Sink = NullSink()
        self._bar: Progress | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_kept(self) -> bool:
        """Return True if the lines are written to a file as well."""
        return self._log is not None

    def keep(self, log: AppendFile, warnings: Sink) -> None:
        """Write the same lines to a file from now on, and warnings to a sink for the report."""
        self._log, self._warnings = log, warnings

    def say(self, text: str = "", style: str | None = None) -> None:
        """Print one or more lines, above the bar."""
        text = printable(text)  # it may contain file names and parts of the data
        if self._screen:
            self._screen.print(text, style=style, markup=False)
        if self._log:
            self._log.write(f"{text}\n")

    def warn(self, text: str, *, step: int, style: str | None = None) -> None:
        """Print a warning, and record it for the report of the run."""
        self.say(text, style=style)
        self._warnings.write({"step": step, "time_unix": time.time(), "text": text})

    def block(
        self, title: str, facts: Iterable[tuple[str, str]], *, style: str = "bold", alarm: str = ""
    ) -> None:
        """Print (label, text) lines under a title; lines with the label `alarm` are red."""
        facts = list(facts)
        width = max((len(label) for label, _ in facts), default=0)
        self.say(title, style=style)
        for label, text in facts:
            red = "red" if label and label == alarm else None
            for number, part in enumerate(text.splitlines() or [""]):
                self.say(f"  {label if number == 0 else '':<{width}}  {part}", style=red)

    @contextlib.contextmanager
    def timer(self, what: str) -> Iterator[None]:
        """Show that a long operation is running, such as compilation, and print its duration."""
        begun = time.monotonic()
        if self._is_live:
            seconds = TextColumn(f"{what} {{task.elapsed:.0f}}s")
            with Progress(seconds, console=self._screen, transient=True) as bar:
                bar.add_task(what, total=None)
                yield
        else:
            self.say(f"{what} ...")
            yield
        self.say(f"{what}: {formatting.duration(time.monotonic() - begun)}")

    def write(self, record: Record) -> None:
        """Print the row of a record, and move the bar to its step."""
        if self._rows % HEAD_EVERY == 0:
            self.say(" ".join(f"{column.head:>{column.width}}" for column in COLUMNS), style="bold")
        self._rows += 1
        other = "eval" if record["split"] == "train" else "loss"
        values = [None if each.head == other else record.get(each.field) for each in COLUMNS]
        pairs = zip(COLUMNS, values, strict=True)
        cells = [f"{column.show(value):>{column.width}}" for column, value in pairs]
        is_worse = bool(record.get("worse_than"))  # than a coder without a model
        if record["split"] == "train":
            self.say(" ".join(cells), style="red" if is_worse else None)
        else:
            # "-" marks an unknown value; columns that an evaluation does not measure stay empty.
            row = " ".join(" " * len(cell) if cell.strip() == "-" else cell for cell in cells)
            style = "red" if is_worse else "green"
            self.say(f"{row.rstrip()}  {_figures(record)}", style=style)
        self._advance(record["step"])

    def flush(self) -> None:
        """Do nothing: lines are written at once."""

    def close(self) -> None:
        """Remove the bar from the screen; a second call does nothing."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _advance(self, step: int) -> None:
        if step >= self._total:
            self.close()
        if not self._is_live or step >= self._total:
            return
        if not self._bar:
            self._bar = Progress(
                BarColumn(bar_width=None),
                TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
                console=self._screen,
                transient=True,
                refresh_per_second=4,
            )
            self._bar.add_task("steps", total=self._total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=step)


def _figures(record: Record) -> str:
    shown = {"bits_per_byte": "bits/byte", "bits_per_byte_text": "without ends"}
    shown |= {"perplexity": "perplexity", "token_accuracy": "accuracy"}
    parts = [f"{label} {record[k]:.4g}" for k, label in shown.items() if record.get(k) is not None]
    if (error := record.get("loss_stderr")) is not None:
        parts.insert(0, f"loss \u00b1 {error:.2g}, {record['share']:.1%} of the set")
    if worse := record.get("worse_than"):
        parts.append(f"worse than {worse}")
    return ", ".join([record["split"], *parts])
