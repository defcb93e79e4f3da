"""Bytes of files, unpacked where they are packed, of which no more is ever held than was asked for."""

import bz2
import gzip
import itertools
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jaxlm.corpus.readers.members import members
from jaxlm.data import records

PACKED = ".gz", ".zst", ".bz2", ".xz"
MOST_PASSED = 2**30  # bytes of one line that are read past; a bomb unpacks to more


DAMAGED = "damaged"  # class of what is broken so
_EMPTY = "it should hold something packed, and is empty"  # what is left of a copy that never began


class TooLarge(Exception):
    """A document, a line or an archive holds more than it may."""


def opened(path: Path) -> IO[bytes]:
    """The bytes of a file as they were before they were packed.

    Raises:
      EOFError: where it is packed, and empty.
    """
    if is_packed(path.name) and not path.stat().st_size:
        raise EOFError(_EMPTY)
    if _is_web_archive(path.name):
        return unpacked(open(path, "rb"), path.name)
    if path.suffix == ".bz2":
        return bz2.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".xz":
        return lzma.open(path, "rb")  # type: ignore[return-value]
    return gzip.open(path, "rb") if path.suffix == ".tgz" else records.opened(path)  # type: ignore[return-value]


def unpacked(stream: IO[bytes], name: str) -> IO[bytes]:
    """The bytes of a buffered stream as they were before they were packed, as its name says.

    Raises:
      EOFError: where it is packed, and empty.
    """
    if is_packed(name) and not stream.peek(1):  # type: ignore[attr-defined]
        raise EOFError(_EMPTY)
    if _is_web_archive(name):
        return members(stream)
    match Path(name).suffix:
        case ".gz" | ".tgz":
            return gzip.GzipFile(fileobj=stream)  # type: ignore[return-value]
        case ".bz2":
            return bz2.BZ2File(stream)  # type: ignore[return-value]
        case ".xz":
            return lzma.LZMAFile(stream)  # type: ignore[return-value]
        case ".zst":
            return records.frames(stream)
    return stream


def kind_of(name: str) -> str:
    """The ending that says what a file holds, that of its packing left out: `.jsonl` of `a.jsonl.gz`."""
    path = Path(name.lower())
    if path.suffix == ".tgz":
        return ".tar"
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


def is_packed(name: str) -> bool:
    """Whether what a file of this name holds is packed."""
    return Path(name).suffix in (*PACKED, ".tgz")


def _is_web_archive(name: str) -> bool:
    return name.endswith(".gz") and kind_of(name) in (".warc", ".wet")


def whole(stream: IO[bytes], most: int) -> bytes:
    """All that is left of a stream.

    Raises:
      TooLarge: where that is more than `most` bytes.
    """
    data = stream.read(most + 1)
    if len(data) > most:
        raise TooLarge(f"more than {most:,} bytes")
    return data


def lines(stream: IO[bytes], most: int, before: int = 0) -> Iterator[tuple[int, bytes | None]]:
    """Each line and its number behind those `before`; None for one of more than `most` bytes, which is read past.

    Raises:
      TooLarge: where a line does not end for a gigabyte.
    """
    for number in itertools.count(before + 1):
        line = stream.readline(most + 1)
        if not line:
            return
        if len(line) <= most:
            yield number, line
        else:
            for _ in rest(stream, line, number):
                pass
            yield number, None


def rest(stream: IO[bytes], line: bytes, number: int) -> Iterator[bytes]:
    """A line that is longer than was asked for, from its begin on, a piece at a time.

    Raises:
      TooLarge: where it does not end for a gigabyte.
    """
    passed = 0
    while line:
        yield line
        if line.endswith(b"\n"):
            return
        line = stream.readline(2**20)
        passed += len(line)
        if passed > MOST_PASSED:
            raise TooLarge(f"line {number} has more than {MOST_PASSED:,} bytes")
