"""Byte streams of files, unpacked if they are compressed; they hold no more than was requested."""

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
MOST_PASSED = 2**30  # bytes of a line that are skipped; a decompression bomb has more


DAMAGED = "damaged"  # kind of broken record
_EMPTY = "it should be compressed data, and is empty"  # left by a copy that never began


class TooLarge(Exception):
    """A document, a line or an archive exceeds its limit."""


def opened(path: Path) -> IO[bytes]:
    """Open a file, unpacked.

    Raises:
      EOFError: it is compressed, and empty.
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
    """Unpack a buffered stream, by the suffix of its name.

    Raises:
      EOFError: it is compressed, and empty.
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
    """Return the suffix of the format, without compression: `.jsonl` of `a.jsonl.gz`."""
    path = Path(name.lower())
    if path.suffix == ".tgz":
        return ".tar"
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


def is_packed(name: str) -> bool:
    """Return whether a file of this name is compressed."""
    return Path(name).suffix in (*PACKED, ".tgz")


def _is_web_archive(name: str) -> bool:
    return name.endswith(".gz") and kind_of(name) in (".warc", ".wet")


def whole(stream: IO[bytes], most: int) -> bytes:
    """Read the rest of a stream.

    Raises:
      TooLarge: it has more than `most` bytes.
    """
    data = stream.read(most + 1)
    if len(data) > most:
        raise TooLarge(f"more than {most:,} bytes")
    return data


def lines(stream: IO[bytes], most: int, before: int = 0) -> Iterator[tuple[int, bytes | None]]:
    """Yield number and bytes of each line, counted after `before`; None if longer than `most`.

    Raises:
      TooLarge: a line does not end within a gigabyte.
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
    """Yield a line longer than the limit in pieces.

    Raises:
      TooLarge: it does not end within a gigabyte.
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
