"""Files of lines that are written together, with the digest of each."""

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from jaxlm.core.errors import DataError


@dataclasses.dataclass(frozen=True)
class Written:
    """What tells a file from others."""

    lines: int
    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path, lines: int) -> "Written":
        """That of a file, of which it is known what it holds."""
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(lines, path.stat().st_size, digest)


class LineFiles:
    """Files in a folder, each opened with its first line. It closes them at the end of its block."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        self._digests: dict[str, Any] = {}
        self._lines: dict[str, int] = {}

    def __enter__(self) -> "LineFiles":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def write(self, name: str, line: bytes) -> None:
        """Adds a line to a file."""
        if name not in self._files:
            self._files[name] = open(self._folder / name, "wb")  # noqa: SIM115 - closed in __exit__
            self._digests[name] = hashlib.sha256()
            self._lines[name] = 0
        self._files[name].write(line)
        self._digests[name].update(line)
        self._lines[name] += 1

    def written(self) -> dict[str, Written]:
        """Every file so far, by name."""
        return {
            name: Written(self._lines[name], self._files[name].tell(), digest.hexdigest())
            for name, digest in sorted(self._digests.items())
        }


def checked_lines(path: Path, expected: Written) -> Iterator[bytes]:
    """The lines of a file that was written before.

    Raises:
      DataError: at its end, where they are not those that were written.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for line in file:
            digest.update(line)
            yield line
    if digest.hexdigest() != expected.sha256:
        raise changed(path)


def is_whole(path: Path, expected: Written) -> bool:
    """Whether a file is there and is what was written."""
    if not path.is_file() or path.stat().st_size != expected.bytes:
        return False
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == expected.sha256


def changed(path: Path) -> DataError:
    """That a file is not what this command wrote."""
    return DataError(
        "a file was changed after it was written",
        where=str(path),
        why="its sha256 differs from the one noted with it",
        fix="the same command with another --out",
    )
