"""Samples of an evaluated task on disk: `samples.jsonl` is the state from which it resumes.

Example:
  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...     path = Path(folder, "samples.jsonl")
  ...     _ = path.write_text('{"id": "a"}\\n{"id": "b')
  ...     with Samples(path) as samples:
  ...         samples.append([{"id": "b"}])
  ...         [line["id"] for line in samples.lines]
  ['a', 'b']
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jaxlm.core.errors import cannot_keep
from jaxlm.monitor import sinks

SAMPLES = "samples.jsonl"
CUT_BYTES = 2**16  # read at a time to find the last whole line


class SampleFile:
    """The lines of `samples.jsonl`; memory holds one at a time.

    As a context manager it opens the file for appending and cuts a torn last line. `count` is the
    number of lines on disk. In a run of several processes only the writer has a file.

    Args:
      path: the file.
      is_writer: this process has the file; another one counts appended lines.

    Raises:
      DataError: if a line is not a JSON object.
      SaveFailed: if the disk is full.
      NotWritable: if the file cannot be written for another reason.
    """

    def __init__(self, path: Path, *, is_writer: bool = True):
        self.path, self.count, self._is_writer = path, 0, is_writer
        self._file: sinks.AppendFile | None = None

    def __enter__(self) -> Self:
        if self._is_writer:
            self.count = sum(1 for _ in self.each())
            size = whole_bytes(self.path)
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                if self.path.exists() and self.path.stat().st_size > size:
                    os.truncate(self.path, size)
            except OSError as error:
                raise cannot_keep(self.path.name, self.path, error) from error
            self._file = sinks.AppendFile(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def each(self) -> Iterator[dict[str, Any]]:
        """Yield the lines on disk."""
        return sinks.stream(self.path, {}, fix=f"rm {self.path}    # its items are scored again")

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines; raises as the constructor."""
        if self._file is not None:
            self._file.write("".join(map(sinks.line, lines)))
        self.count += len(lines)


class Samples(SampleFile):
    """A `SampleFile` whose `lines` are also in memory."""

    def __enter__(self) -> Self:
        super().__enter__()
        self.lines = list(self.each())
        return self

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines; raises as the constructor."""
        super().append(lines)
        self.lines += [json.loads(sinks.line(each)) for each in lines]


def whole_bytes(path: Path) -> int:
    """Return the bytes of the whole lines of a file; a missing file has none."""
    size = path.stat().st_size if path.exists() else 0
    if not size:
        return 0
    with open(path, "rb") as file:
        for end in range(size, 0, -CUT_BYTES):
            first = max(end - CUT_BYTES, 0)
            file.seek(first)
            place = file.read(end - first).rfind(b"\n")
            if place >= 0:
                return first + place + 1
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file; a missing file has none."""
    return list(SampleFile(path).each())
