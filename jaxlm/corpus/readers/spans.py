"""Large files divided between records: several processes read one, and a kill costs less.

A span of a table is read behind the table's names, so its reader is that of a whole file.
"""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxlm.corpus.readers.encoding import PROBED, is_utf8
from jaxlm.data import parquet
from jaxlm.data.formats import ByteReader

_PIECE = 2**20


class FileSpan(NamedTuple):
    """Adjacent records of a file: a range of bytes, or of row groups in a Parquet file."""

    begin: int
    end: int
    before: int  # records of the file before them
    names: int = 0  # bytes at the begin of a table, its names, that are read before the span


class Boundary(NamedTuple):
    """A place where a file can be divided: the records behind it do not depend on those before."""

    place: int  # bytes
    records: int  # before it


def count(size: int, most: int) -> int:
    """Return the number of spans of a file of this size; it does not depend on the content."""
    return max(1, -(-size // most))


def of_lines(path: Path, most: int) -> Iterator[FileSpan]:
    """Yield the lines that begin in each `most` bytes of a file; none if a longer line fills them.

    In UTF-16 and UTF-32 all lines are in the first span, as their line ends are not single bytes.
    """
    with open(path, "rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        if not is_utf8(file.read(PROBED)):
            yield from uncut(size, most)
            return
        file.seek(0)
        lines = 0
        for number in range(1, count(size, most) + 1):
            begin, before, limit = file.tell(), lines, min(number * most, size)
            if begin < limit:
                while (left := limit - 1 - file.tell()) > 0:
                    lines += file.read(min(left, _PIECE)).count(b"\n")
                # The line with the last byte before the limit is the last that begins before it.
                part = b""
                while not part.endswith(b"\n") and (part := file.readline(_PIECE)):
                    pass
                lines += part.endswith(b"\n")
            yield FileSpan(begin, file.tell(), before)


def of_row_groups(path: Path, most: int) -> Iterator[FileSpan]:
    """Yield the row groups that begin in each `most` bytes of a Parquet file."""
    size, groups = path.stat().st_size, parquet.row_groups(path)
    begin = before = 0
    for number in range(1, count(size, most) + 1):
        end, rows = begin, 0
        while end < len(groups) and (groups[end][0] < number * most or number * most >= size):
            rows += groups[end][1]
            end += 1
        yield FileSpan(begin, end, before)
        begin, before = end, before + rows


def at_boundaries(
    boundaries: Iterable[Boundary], size: int, most: int, names: int = 0
) -> Iterator[FileSpan]:
    """Yield the records that begin in each `most` bytes of a file, between its boundaries.

    Args:
      boundaries: the places where a record begins, in order; the first is 0 or the end of names.
      size: bytes of the file.
      most: bytes of a span.
      names: bytes that every span but the first is read behind.
    """
    begins = [0] * count(size, most)
    records = [0] * len(begins)
    filled = 0
    for place, before in boundaries:
        number = min(place // most, len(begins) - 1)
        for each in range(filled + 1, number + 1):
            begins[each], records[each] = place, before
        filled = max(filled, number)
    for each in range(filled + 1, len(begins)):
        begins[each] = size
    for begin, end, before in zip(begins, [*begins[1:], size], records, strict=True):
        yield FileSpan(begin, end, before, names if begin else 0)


def uncut(size: int, most: int) -> list[FileSpan]:
    """Return spans whose first is the whole file and whose others are empty."""
    return [FileSpan(0, size, 0), *[FileSpan(size, size, 0)] * (count(size, most) - 1)]


def opened(path: Path, span: FileSpan) -> io.BufferedReader:
    """Open the bytes of a span, behind the names of its table, as a stream."""
    return io.BufferedReader(_Slice(path, span), 2**17)


class _Slice(ByteReader):
    """Ranges of bytes of a file, joined."""

    def __init__(self, path: Path, span: FileSpan):
        super().__init__(open(path, "rb", buffering=0))  # noqa: SIM115 - closed by `close`
        self._ranges = [(span.begin, span.end), (0, span.names)]
        self._left = 0

    def pull(self, size: int) -> bytes:
        while not self._left and self._ranges:
            begin, end = self._ranges.pop()
            self._source.seek(begin)
            self._left = end - begin
        data = self._source.read(min(size, self._left))
        self._left -= len(data)
        return data
