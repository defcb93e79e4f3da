"""Sinks of a run's records, and the JSON files of a run directory.

Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Jsonl(f"{folder}/metrics.jsonl")
    ...     file.write({"step": 1, "split": "train", "loss_nats": math.inf})
    ...     file.close()
    ...     [record["not_finite"] for record in read(file.path)]
    [{'loss_nats': 'inf'}]
"""

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxlm.core import disk
from jaxlm.core.callbacks import Callback, Event
from jaxlm.core.errors import FULL, DataError, cannot_keep
from jaxlm.core.quoting import CONTROLS

Record = Mapping[str, Any]
AnyPath = str | os.PathLike[str]
Action = Callable[[], None]


class Sink(Protocol):
    """Destination of records: flat, with `step`, `split` and `time_unix`, as in metrics.jsonl."""

    def write(self, record: Record) -> None:
        """Write one record."""

    def flush(self) -> None:
        """Return when all records so far would survive a crash of the machine."""

    def close(self) -> None:
        """Flush and close; a second call does nothing."""


class AppendFile:
    """A text file for appending; written text is passed to the operating system at once.

    If the disk is full, `make_room` is called, once in a write, before the rest is tried again.
    Raises SaveFailed if the disk is full, NotWritable if the file is not writable.
    """

    def __init__(self, path: AnyPath, *, make_room: Action = lambda: None):
        self.path, self._make_room = Path(path), make_room
        with _keeping(self.path):
            # Unbuffered: nothing is pending after a failure.
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  closed by close()

    def write(self, text: str) -> None:
        """Append the text."""
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
        with _keeping(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()


class Jsonl(AppendFile):
    """A file of one JSON object a line.

    Opening the file removes a torn last line and the lines of steps after `keep_through`, which a
    run resumed at that step will write again. `dropped` are the removed lines.

    Floats are written with all digits. JSON has no infinity: a number that is not finite is
    written as null and its name added to `not_finite`.
    """

    def __init__(
        self, path: AnyPath, *, keep_through: int | None = None, make_room: Action = lambda: None
    ):
        with _keeping(Path(path)):
            kept_bytes, self.dropped = _kept(Path(path), keep_through)
            if self.dropped:
                os.truncate(path, kept_bytes)
        super().__init__(path, make_room=make_room)

    def write(self, record: Record) -> None:  # type: ignore[override]
        self.write_all([record])

    def write_all(self, records: Iterable[Record]) -> None:
        """Write records in one piece."""
        super().write("".join(map(line, records)))


@contextlib.contextmanager
def _keeping(path: Path) -> Iterator[None]:
    """Raise SaveFailed or NotWritable for an OSError of a file of the run."""
    try:
        yield
    except OSError as error:
        raise cannot_keep(path.name, path, error) from error


class NullSink:
    """Discards records: only one process of a run writes them."""

    def write(self, record: Record) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file of a run. Raises DataError if the file is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        what, why = f"{path.name} of the run is not JSON", f"{type(error).__name__}: {error}"
        where, copy = str(path), "a copy of the run"
        raise DataError(what, where=where, why=why, fix=f"restore it from {copy}") from error


def replace(target: Path, content: bytes) -> None:
    """Replace a file as `disk.replace` does. Raises SaveFailed at a full disk, else NotWritable."""
    with _keeping(target):
        disk.replace(target, content)


def numbers(record: Record) -> dict[str, float]:
    """Return the numbers of a record, each as split/name."""
    return {
        f"{record['split']}/{name}": value
        for name, entry in record.items()
        if name not in ("step", "time_unix") and isinstance(value := plain(entry), int | float)
    }


def line(record: Record) -> str:
    """Return a record as a line of strict JSON."""
    values = {name: plain(value) for name, value in record.items()}
    known = finite(values)
    if bad := {name: str(value) for name, value in values.items() if value is not known[name]}:
        values = known | {"not_finite": bad}
    text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    return CONTROLS.sub(lambda match: json.dumps(match[0])[1:-1], text) + "\n"


def finite(record: Record) -> dict[str, Any]:
    """Return a record with None in place of numbers that JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


def plain(value: Any) -> Any:
    """Return a NumPy or JAX scalar as a Python number with all digits; other values unchanged."""
    return value.item() if getattr(value, "shape", None) == () else value


def ranking_loss(record: Record) -> float | None:
    """Return the loss in nats of an evaluation that others are compared with, None without one.

    That is of as many batches as theirs, also at the end of a run, whose `loss_nats` is of a whole
    set.
    """
    loss: float | None = record.get("ranking_loss_nats", record.get("loss_nats"))
    return loss if is_number(loss) else None


def is_number(value: Any) -> bool:
    """Return True for a number to calculate with; JSON can hold larger ones."""
    return isinstance(value, int | float) and abs(value) < 1e300


def is_step(value: Any) -> bool:
    """Return True for a number of completed updates."""
    return isinstance(value, int) and 0 <= value < 2**63


def is_text(value: Any) -> bool:
    """Return True for a string."""
    return isinstance(value, str)


Shape = Mapping[str, Callable[[Any], bool]]  # predicates of the values under some keys

FIGURES = (
    *("loss_nats", "perplexity", "bits_per_byte", "bits_per_byte_text"),
    *("token_accuracy", "calibration_error"),
)
_MEASURED = "time_unix learning_rate grad_norm tokens share loss_stderr tokens_per_second mfu"
METRICS: Shape = {
    "step": is_step,
    "split": lambda value: isinstance(value, str | None),
    **dict.fromkeys(
        (*FIGURES, *_MEASURED.split(), "peak_bytes"),
        lambda value: value is None or is_number(value),
    ),
}


def read(path: AnyPath, shape: Shape = METRICS, fix: str = "") -> list[dict[str, Any]]:
    """Return the records of a .jsonl file without a torn last line; a missing file has none.

    Raises DataError if another line is not a JSON object, or has another shape. Its fix removes the
    line, unless there is another `fix`.
    """
    return list(stream(path, shape, fix))


def stream(path: AnyPath, shape: Shape = METRICS, fix: str = "") -> Iterator[dict[str, Any]]:
    """Yield the records that `read` returns, one in memory at a time; raises as it does."""
    path = Path(path)
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(open(path, "rb")) if path.exists() else ()
        for number, text in enumerate(lines, 1):
            if not text.endswith(b"\n"):
                return
            try:
                record = json.loads(text)
            except (ValueError, RecursionError):
                record = None
            if wrong := misshapen(record, shape):
                what, fix = f"{path.name} is damaged", fix or f"sed -i {number}d {path}"
                raise DataError(what, where=f"{path}:{number}", why=f"this line {wrong}", fix=fix)
            yield record


def misshapen(value: Any, shape: Shape) -> str:
    """Return why a value is not a JSON object of this shape; empty if it is."""
    if not isinstance(value, dict):
        return "is not a JSON object"
    bad = [name for name, is_right in shape.items() if not is_right(value.get(name))]
    return f"has {value.get(bad[0])!r} for {bad[0]!r}" if bad else ""


def _kept(path: Path, keep_through: int | None) -> tuple[int, list[bytes]]:
    """Return the bytes of a file to keep, and the lines after them."""
    if not path.is_file():
        return 0, []
    kept_bytes = 0
    lines = path.read_bytes().splitlines(keepends=True)
    for index, text in enumerate(lines):
        if not text.endswith(b"\n"):
            return kept_bytes, lines[index:]
        if keep_through is not None:
            try:
                late = json.loads(text).get("step", 0) > keep_through
            except (ValueError, AttributeError, TypeError, RecursionError):
                late = False  # `read` reports damage in the middle; it is not cut off here
            if late:
                return kept_bytes, lines[index:]
        kept_bytes += len(text)
    return kept_bytes, []


Function = Callable[[int, dict[str, Any]], Any]


class Callbacks(NullSink):
    """Calls the user's functions with the step and each record, as in metrics.jsonl.

    Objects of `Callback` are called with events instead. If one returns True, the run ends. If one
    raises, no other is called, and `fail` raises its error once the state is saved.
    """

    def __init__(self, callbacks: Sequence[Function | Callback] = ()):
        self.observers = tuple(each for each in callbacks if isinstance(each, Callback))
        self.functions = tuple(each for each in callbacks if not isinstance(each, Callback))
        self.is_over = False
        self.error: Exception | None = None

    def write(self, record: Record) -> None:
        """Call the functions."""
        self._call([functools.partial(f, record["step"], dict(record)) for f in self.functions])

    def is_observed(self, moment: str) -> bool:
        """Return whether an object overrides the method of a moment."""
        return any(
            getattr(type(o), moment) is not getattr(Callback, moment) for o in self.observers
        )

    def observe(self, moment: str, event: Event) -> None:
        """Call the method of a moment of each object."""
        self._call([functools.partial(getattr(each, moment), event) for each in self.observers])

    def _call(self, actions: Iterable[Callable[[], Any]]) -> None:
        if self.error is not None:
            return
        try:
            for action in actions:
                if action():
                    self.is_over = True
        except Exception as error:  # of the user
            self.error, self.is_over = error, True

    def fail(self) -> None:
        """Raise the error of a callback, if there was one."""
        if self.error is not None:
            raise self.error
