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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jaxlm.core.errors import cannot_keep
from jaxlm.monitor import sinks

SAMPLES = "samples.jsonl"


class Samples:
    """The lines of `samples.jsonl`, one for each item in the order of the task.

    As a context manager it opens the file for appending and cuts a torn last line. `lines` are
    those on disk. In a run of several processes only the writer has a file.

    Args:
      path: the file.
      is_writer: this process has the file; another one keeps appended lines in memory.

    Raises:
      DataError: if a line is not a JSON object.
      SaveFailed: if the disk is full.
      NotWritable: if the file cannot be written for another reason.
    """

    def __init__(self, path: Path, *, is_writer: bool = True):
        self.path, self._is_writer = path, is_writer
        self.lines: list[dict[str, Any]] = []
        self._file: sinks.AppendFile | None = None

    def __enter__(self) -> Self:
        if self._is_writer:
            self.lines, size = read(self.path)
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

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines; raises as the constructor."""
        text = "".join(map(sinks.line, lines))
        if self._file is not None:
            self._file.write(text)
        self.lines += [json.loads(each) for each in text.splitlines()]


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the whole lines of a file and their bytes; a missing file has none."""
    lines = sinks.read(path, {}, fix=f"rm {path}    # its items are scored again")
    return lines, path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
