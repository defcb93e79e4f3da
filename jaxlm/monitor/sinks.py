"""Where the record of a step goes."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxlm.core import disk
from jaxlm.core.errors import FULL, DataError, cannot_keep
from jaxlm.core.quoting import CONTROLS

Record = Mapping[str, Any]


class Sink(Protocol):
    """Takes records: flat, with `step`, `split` and `time_unix`, under the names of metrics.jsonl."""

    def write(self, record: Record) -> None:
        """Takes one record."""

    def flush(self) -> None:
        """Returns when every record so far would survive the death of the machine."""

    def close(self) -> None:
        """Flushes and lets go."""


class Lines:
    """A text file that grows; the operating system has what was written when `write` returns.

    Args:
      make_room: called where the disk is full, once in a write, before the rest of it is tried again.

    Raises:
      SaveFailed: where the disk is full.
      NotWritable: where the file cannot be opened or written for another reason.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, make_room: Callable[[], None] = lambda: None
    ):
        self.path, self._make_room = Path(path), make_room
        try:
            # Unbuffered: nothing is left over after a failure.
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  closed by close()
        except OSError as error:
            raise cannot_keep(self.path.name, self.path, error) from error

    def write(self, text: str) -> None:
        """Appends the text."""
        rest, has_room = text.encode(), False
        while rest:
            try:
                rest = rest[self._file.write(rest) :]
            except OSError as error:
                if has_room or error.errno not in FULL:
                    raise cannot_keep(self.path.name, self.path, error) from error
                self._make_room()
                has_room = True

    def flush(self) -> None:
        """Returns when all of it is on the disk."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise cannot_keep(self.path.name, self.path, error) from error

    def close(self) -> None:
        """Flushes and closes; a second time does nothing."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()


class Jsonl:
    """One JSON object a line, appended as `Lines` does.

    At opening, a torn last line is cut, and so are the lines of steps after `keep_through`: a run that goes on from
    step k will write those again. `dropped` says how many lines went.

    Floats are written with all their digits. JSON has no infinity: a number that is not finite is written as null and
    named under `not_finite`.

    Raises:
      SaveFailed: where the disk is full.
      NotWritable: where the file cannot be opened or written for another reason.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep_through: int | None = None,
        make_room: Callable[[], None] = lambda: None,
    ):
        path = Path(path)
        try:
            kept, self.dropped = _kept(path, keep_through)
            if self.dropped:
                os.truncate(path, kept)
        except OSError as error:
            raise cannot_keep(path.name, path, error) from error
        self._lines = Lines(path, make_room=make_room)

    def write(self, record: Record) -> None:
        """Appends one line; the operating system has it when this returns."""
        self._lines.write(line(record))

    def flush(self) -> None:
        """Returns when every line is on the disk."""
        self._lines.flush()

    def close(self) -> None:
        """Flushes and closes; a second time does nothing."""
        self._lines.close()


class Nowhere:
    """Takes records and keeps none: all but one process of a run write there."""

    def write(self, record: Record) -> None:
        """Forgets it."""

    def flush(self) -> None:
        """There is nothing to flush."""

    def close(self) -> None:
        """There is nothing to close."""


def read_json(path: Path) -> Any:
    """What a JSON file of a run holds.

    Raises:
      DataError: where it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path.name} of the run is not JSON",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            fix="bring it back from a copy of the run",
        ) from error


def replace(target: Path, content: bytes) -> None:
    """Replaces a file as a whole: readers see the old one or the new, and the new one is on the disk when this returns.

    Raises:
      SaveFailed: where the disk is full; the old file stays.
      NotWritable: where it cannot be written for another reason; the old file stays.
    """
    try:
        disk.replace(target, content)
    except OSError as error:
        raise cannot_keep(target.name, target, error) from error


class TensorBoard:
    """Scalars as `split/name` in TensorBoard's event files. Events of steps after `keep_through` are purged."""

    def __init__(self, folder: str | os.PathLike[str], *, keep_through: int | None = None):
        from tensorboardX import SummaryWriter  # a second to import

        purge = None if keep_through is None else keep_through + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, record: Record) -> None:
        """Writes every number of the record but its step and time."""
        for name, value in record.items():
            if name not in ("step", "time_unix") and isinstance(plain(value), int | float):
                self._writer.add_scalar(
                    f"{record['split']}/{name}",
                    value,
                    record["step"],
                    walltime=record["time_unix"],
                )

    def flush(self) -> None:
        """Hands what is queued to the operating system."""
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


def line(record: Record) -> str:
    """A record as a line of strict JSON."""
    values = {name: plain(value) for name, value in record.items()}
    bad = {k: str(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    if bad:
        values = {k: None if k in bad else v for k, v in values.items()} | {"not_finite": bad}
    text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    return CONTROLS.sub(lambda match: json.dumps(match[0])[1:-1], text) + "\n"


def plain(value: Any) -> Any:
    """The Python number in a NumPy or JAX scalar, every digit of it; other values as they are."""
    return value.item() if getattr(value, "shape", None) == () else value


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a number to calculate with; some of those that JSON can hold are not."""
    return isinstance(value, int | float) and abs(value) < 1e300


def is_figure(value: Any) -> bool:
    """Whether it is a number, or null for one that is not known."""
    return value is None or is_number(value)


def is_range(value: Any) -> bool:
    """Whether it is a pair of numbers."""
    return isinstance(value, list) and len(value) == 2 and all(map(is_number, value))


def is_bytes(value: Any) -> bool:
    """Whether it is an account of memory, whose `total` is a number."""
    return isinstance(value, dict) and is_number(value.get("total"))


def is_step(value: Any) -> bool:
    """Whether it counts completed updates."""
    return isinstance(value, int) and 0 <= value < 2**63


def is_text(value: Any) -> bool:
    """Whether it is a string."""
    return isinstance(value, str)


Shape = Mapping[str, Callable[[Any], bool]]  # what the values under some names must be

FIGURES = (
    "loss_nats",
    "perplexity",
    "bits_per_byte",
    "bits_per_byte_text",
    "token_accuracy",
    "calibration_error",
)
METRICS: Shape = (
    {"step": is_step, "split": lambda value: isinstance(value, str | None)}
    | dict.fromkeys(FIGURES, is_figure)
    | dict.fromkeys(
        ("time_unix", "learning_rate", "grad_norm", "tokens", "share", "loss_stderr"), is_figure
    )
    | dict.fromkeys(("tokens_per_second", "mfu", "peak_bytes"), is_figure)
)


def read(path: str | os.PathLike[str], shape: Shape = METRICS) -> list[dict[str, Any]]:
    """The records of a .jsonl file; a torn last line is left out, and a missing file has none.

    Raises:
      DataError: where another line is not a JSON object, or not one of this shape.
    """
    path = Path(path)
    records: list[dict[str, Any]] = []
    if not path.exists():
        return records
    for number, text in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not text.endswith(b"\n"):
            break
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = None
        if wrong := misshapen(record, shape):
            raise DataError(
                f"{path.name} is damaged",
                where=f"{path}:{number}",
                why=f"this line {wrong}",
                fix=f"sed -i {number}d {path}",
            )
        records.append(record)
    return records


def misshapen(value: Any, shape: Shape) -> str:
    """What keeps a value from being a JSON object of this shape, in words; empty where nothing does."""
    if not isinstance(value, dict):
        return "is not a JSON object"
    bad = [name for name, is_right in shape.items() if not is_right(value.get(name))]
    return f"has {value.get(bad[0])!r} for {bad[0]!r}" if bad else ""


def _kept(path: Path, keep_through: int | None) -> tuple[int, int]:
    """Bytes to keep, and lines beyond them."""
    if not path.is_file():
        return 0, 0
    kept = 0
    lines = path.read_bytes().splitlines(keepends=True)
    for index, text in enumerate(lines):
        if not text.endswith(b"\n"):
            return kept, len(lines) - index
        if keep_through is not None:
            try:
                late = json.loads(text).get("step", 0) > keep_through
            except (ValueError, AttributeError, TypeError, RecursionError):
                late = False  # damage in the middle is for `read` to report, not to cut away
            if late:
                return kept, len(lines) - index
        kept += len(text)
    return kept, 0


Callback = Callable[[int, dict[str, Any]], Any]


class Callbacks:
    """A sink that calls functions of the user with the step and each record, as metrics.jsonl has it.

    A true answer asks for the end of the run. If a function raises, no other is called, and `fail`
    raises its error once the state is saved.
    """

    def __init__(self, functions: Sequence[Callback] = ()):
        self.functions = tuple(functions)
        self.is_over = False
        self.error: Exception | None = None

    def write(self, record: Record) -> None:
        """Call all functions."""
        if self.error is not None:
            return
        try:
            for function in self.functions:
                if function(record["step"], dict(record)):
                    self.is_over = True
        except Exception as error:  # the user's own
            self.error, self.is_over = error, True

    def fail(self) -> None:
        """Raise what a function has raised, if any."""
        if self.error is not None:
            raise self.error

    def flush(self) -> None:
        """Do nothing: records are not buffered."""

    def close(self) -> None:
        """Do nothing."""
