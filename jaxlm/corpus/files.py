"""Files of lines that are written together, with their digests."""

import contextlib
import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from jaxlm.core import disk
from jaxlm.core.errors import DataError


@dataclasses.dataclass(frozen=True)
class FileDigest:
    """Size and digest of a file."""

    lines: int
    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path, lines: int) -> "FileDigest":
        """Compute the digest of a file of `lines` lines."""
        return cls(lines, path.stat().st_size, disk.sha256(path))


class LineFiles(contextlib.ExitStack):
    """Files in a folder, each opened at its first line and closed at the end of the block."""

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        self._digests: dict[str, Any] = {}
        self._lines = Counter[str]()

    def write(self, name: str, line: bytes) -> None:
        """Append a line to a file."""
        if name not in self._files:
            self._files[name] = self.enter_context(open(self._folder / name, "wb"))  # noqa: SIM115
            self._digests[name] = hashlib.sha256()
        self._files[name].write(line)
        self._digests[name].update(line)
        self._lines[name] += 1

    def written(self) -> dict[str, FileDigest]:
        """Return the digest of every file so far, by name."""
        return {
            name: FileDigest(self._lines[name], self._files[name].tell(), digest.hexdigest())
            for name, digest in sorted(self._digests.items())
        }


def read_object(path: Path) -> dict[str, Any]:
    """Parse a JSON object that this command wrote. Raises DataError if the file is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise changed(path) from None
    if not isinstance(content, dict):
        raise changed(path)
    return content


def checked_lines(path: Path, expected: FileDigest) -> Iterator[bytes]:
    """Yield the lines of a file. Raises DataError at the end if the digest differs."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for line in file:
            digest.update(line)
            yield line
    if digest.hexdigest() != expected.sha256:
        raise changed(path)


def is_whole(path: Path, expected: FileDigest) -> bool:
    """Return whether a file exists and has the expected size and digest."""
    if not path.is_file() or path.stat().st_size != expected.bytes:
        return False
    return FileDigest.of(path, expected.lines) == expected


def changed(path: Path) -> DataError:
    """Return the error for a file that is not the one this command wrote."""
    what = "a file was changed after it was written"
    why = "its sha256 differs from the recorded one"
    return DataError(what, where=str(path), why=why, fix="the same command with another --out")
