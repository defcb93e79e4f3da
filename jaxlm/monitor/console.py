"""Console output of a run: a header, a row per logged step, a closing block."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, TextIO

from rich.console import Console as Screen
from rich.progress import BarColumn, Progress, TextColumn

from jaxlm.core.quoting import printable
from jaxlm.monitor import formatting, sinks
from jaxlm.monitor.sinks import AppendFile, NullSink, Record, Sink

HEAD_EVERY = 30  # rows between column heads, so that they are always on the screen
WIDTH = 100  # columns of the widest row


class Column(NamedTuple):
    """A column of the rows: head, width, field of the record, and formatter of its value."""

    head: str
    width: int
    field: str
    show: Callable[[Any], str]


def _three(value: float | None) -> str:
    return "-" if value is None else f"{value:#.3g}".rstrip(".")


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:z.4f}"  # a loss of rounding has no sign


COLUMNS = (
    Column("step", 8, "step", str),
    Column("loss", 8, "loss_nats", _loss),
    Column("reward", 8, "reward", _loss),
    Column("lr", 9, "learning_rate", _three),
    Column("grad", 7, "grad_norm", _three),
    Column("tok/s", 7, "tokens_per_second", formatting.count),
    Column("mfu", 6, "mfu", lambda v: "-" if v is None else f"{v:.1%}"),
    Column("mem", 9, "peak_bytes", formatting.size),
    Column("data wait", 9, "data_wait_seconds", formatting.duration),
    Column("elapsed", 8, "elapsed_seconds", formatting.duration),
    Column("left", 8, "left_seconds", formatting.duration),
)


class Console(contextlib.AbstractContextManager["Console"]):
    """Prints records as rows on a screen, if any; on a terminal with a bar below, up to `total`.

    The file `log` gets the same lines without colors, and the facts that a screen gets only if
    `is_verbose`. A terminal gets long lines wrapped below their beginning.
    """

    def __init__(
        self,
        screen: TextIO | None,
        *,
        log: AppendFile | None = None,
        total: int,
        is_verbose: bool = False,
    ):
        # A notebook requests color in its environment but is no terminal: a bar would leave a line
        # for each frame.
        plain: Any = dict(force_jupyter=False, highlight=False, emoji=False, soft_wrap=True)
        self._screen: Screen | None = None
        self._is_live = False
        if screen:
            self._screen = Screen(file=screen, force_terminal=screen.isatty(), **plain)
            self._is_live = self._screen.is_terminal and not self._screen.is_dumb_terminal
        self._log, self._rows = log, 0
        self.total = total  # steps of the run
        self._is_verbose = is_verbose
        self._figures: tuple[str, float | None] = ("-", None)  # last loss, and the end of the run
        self._columns: list[Column] = []  # those of the last heads
        self._best: dict[str, float] = {}  # lowest loss by set
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
        self._show(text, style)
        self._keep(text)

    def remember(self, records: Iterable[Record]) -> None:
        """Know the lowest loss of each set before a resumed run continues."""
        self._best = {}
        for record in records:
            if record.get("split", "train") != "train":
                self._is_best(record)

    def _show(self, text: str, style: str | None = None, indent: int = 2) -> None:
        """Print on the screen; `indent` is that of the rest of a line that a terminal wraps."""
        if not self._screen:
            return
        text = printable(text)  # it may contain file names and parts of the data
        if self._is_live:
            text = formatting.wrapped(text, self._screen.width, indent)
        self._screen.print(text, style=style, markup=False)

    def _keep(self, text: str) -> None:
        if self._log:
            self._log.write(f"{printable(text)}\n")

    def warn(self, text: str, *, step: int, style: str | None = None) -> None:
        """Print a warning, and record it for the report of the run."""
        self.say(text, style=style)
        self._warnings.write({"step": step, "time_unix": time.time(), "text": text})

    def block(
        self,
        title: str,
        facts: Iterable[tuple[str, str]],
        *,
        style: str = "bold",
        alarm: str = "",
        brief: Collection[str] | None = None,
    ) -> None:
        """Print (label, text) lines under a title.

        Args:
          title: the first line.
          facts: labels and texts.
          style: style of the title.
          alarm: label of the lines that are red.
          brief: labels of the lines for a screen that is not verbose; None for all.
        """
        facts = list(facts)
        everywhere = self._is_verbose or brief is None
        width = max((len(label) for label, _ in facts), default=0)
        self.say(title, style=style)
        for label, text in facts:
            red = "red" if label and label == alarm else None
            for number, part in enumerate(text.splitlines() or [""]):
                line = f"  {label if number == 0 else '':<{width}}  {part}"
                if everywhere or label in (brief or ()):
                    self._show(line, red, indent=width + 4)
                self._keep(line)

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
        is_worse = bool(record.get("worse_than"))  # than a coder without a model
        if record["split"] == "train":
            values = [record.get(each.field) for each in COLUMNS]
            known = [each for each, value in zip(COLUMNS, values, strict=True) if value is not None]
            if self._rows % HEAD_EVERY == 0 or not set(known) <= set(self._columns):
                self._columns, self._rows = known, 0
                self.say(" ".join(f"{each.head:>{each.width}}" for each in known), style="bold")
            self._rows += 1
            cells = (f"{each.show(record.get(each.field)):>{each.width}}" for each in self._columns)
            self.say(" ".join(cells), style="red" if is_worse else None)
        elif scores := {n: v for n, v in record.items() if n.startswith("task.")}:
            for text in _task_scores(record["step"], scores):
                self.say(text)
        else:
            is_best = self._is_best(record)
            style = "red" if is_worse else "green" if is_best else None
            self.say(_evaluation(record, is_best), style=style)
        self._advance(record)

    def _is_best(self, record: Record) -> bool:
        """Return True for the lowest loss of a set so far, and remember it."""
        loss, split = sinks.ranking_loss(record), record["split"]
        if loss is None or not loss < self._best.get(split, float("inf")):
            return False
        self._best[split] = loss
        return True

    def flush(self) -> None:
        """Do nothing: lines are written at once."""

    def close(self) -> None:
        """Remove the bar from the screen; a second call does nothing."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _advance(self, record: Record) -> None:
        """Move the bar to a record; those of training also have the loss and the time left."""
        step = record["step"]
        if step >= self.total:
            self.close()
        if not self._is_live or step >= self.total:
            return
        if not self._bar:
            self._bar = Progress(
                BarColumn(bar_width=None),
                TextColumn("{task.completed:.0f}/{task.total:.0f} steps{task.description}"),
                console=self._screen,
                transient=True,
                refresh_per_second=4,
            )
            self._bar.add_task("", total=self.total)
            self._bar.start()
        if record["split"] == "train":
            left: float | None = record.get("left_seconds")
            ends = None if left is None else time.monotonic() + left
            self._figures = (_loss(record.get("loss_nats")), ends)
        self.advance(step)

    def advance(self, step: int) -> None:
        """Move the bar to a completed step, with the last logged loss and the time left."""
        if self._bar:
            loss, ends = self._figures
            left = None if ends is None else max(ends - time.monotonic(), 0.0)
            text = f"  loss {loss}  {formatting.duration(left)} left"
            self._bar.update(self._bar.task_ids[0], completed=step, description=text)


def _task_scores(step: int, scores: Record) -> list[str]:
    """Return a line for each mean of a task, with its interval if it is known."""
    lines = []
    for name, value in scores.items():
        if name.endswith(("_low", "_high")):
            continue
        low, high = (scores.get(f"{name}_{end}") for end in ("low", "high"))
        doubt = "" if low is None or high is None else f" [{low:.4f}, {high:.4f}]"
        lines.append(f"{step:>{COLUMNS[0].width}} {name.removeprefix('task.')} {value:.4f}{doubt}")
    return lines


def _evaluation(record: Record, is_best: bool) -> str:
    """Return the row of an evaluation: its loss in the column of losses, figures in columns.

    A row of more than WIDTH columns has no accuracy, and then no perplexity.
    """
    first, second = COLUMNS[:2]
    step, loss = record["step"], record.get("loss_nats")
    if "reward" in record:  # whose negative is the loss
        loss = None
    worse, error = record.get("worse_than"), record.get("loss_stderr")
    row = f"{step:>{first.width}} {_loss(loss):>{second.width}}  {record['split']:<5}"
    row += f"  worse than {worse}" if worse else ""
    row += "  best" if is_best else " " * 6
    doubt = "" if error is None else f"  \u00b1{error:.2g} on {record['share']:.1%}"
    shown = {"bits_per_byte": "{:.4f} bits/byte", "draft_greedy": "accepted {:5.1%}"}
    shown |= {"perplexity": "perplexity {:<7.4g}"}
    shown |= {"token_accuracy": "accuracy {:5.1%}"}
    shown |= {"reward": "reward {:.4f}", "pass_1": "pass@1 {:5.1%}"}
    shown |= {"greedy_pass": "greedy {:5.1%}"}
    shown |= {"preference_accuracy": "preferred {:5.1%}", "margin": "margin {:.4f}"}
    for name, pattern in shown.items():
        value = record.get(name)
        text = "" if value is None else f"  {pattern.format(value)}"
        if len(row) + len(text) + len(doubt) <= WIDTH:
            row += text
    return (row + doubt).rstrip()
