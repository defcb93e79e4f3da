"""Readers of formats with a document in each row: those of `data.formats`, and CSV.

The other fields of a row become metadata.
"""

import collections
import csv
import functools
import io
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxlm.corpus.document import BrokenRecord, CorpusDocument
from jaxlm.corpus.readers.encoding import PROBED, as_utf8, is_utf8
from jaxlm.corpus.readers.spans import Boundary, FileSpan, at_boundaries, uncut
from jaxlm.corpus.readers.streams import RawFile, Records, whole
from jaxlm.data.formats import (
    BYTE_ORDER_MARK,
    NOT_UTF8,
    TOO_LARGE,
    Format,
    ReadOptions,
    RecordFault,
    rest,
)
from jaxlm.data.records import NO_TEXT, OTHER_TYPE, mended

NOT_A_ROW = "with more or fewer fields than the table"
NOT_CLOSED = "with a quote that is not closed"
TOO_LONG = "\udfff"  # marks a line over the limit; no byte decodes to it


def records(stream: IO[bytes], file: RawFile, *, format: Format) -> Records:
    """Yield a document for each record of a format that training reads, too.

    The stream is the file, or the bytes of its span of lines.
    """
    span, groups = file.span, None
    before = span.before if span else 0
    if format.is_lines:
        # Spans after the first are in UTF-8: other files are not divided.
        stream = stream if before else as_utf8(stream, file.counts, legacy=False)
    else:
        groups = range(span.begin, span.end) if span else None
        if not stream.seekable():
            stream = io.BytesIO(whole(stream, file.recipe.reading.archive_bytes))
    is_in = functools.partial(file.is_in, file.name)
    options = ReadOptions(file.name, max_line=file.most, before=before, groups=groups, is_in=is_in)
    for number, value, _ in format.read(stream, options):
        if isinstance(value, RecordFault):
            error = value.error
            detail = str(error)[:200]
            if isinstance(error, UnicodeDecodeError):
                detail = f"byte {error.start}: {error.reason}"
            yield file.broken(value.kind, number, detail)
        else:
            yield _of_row(value, file, number)


def separated(stream: IO[bytes], file: RawFile, *, mark: str) -> Records:
    """Yield the rows of a CSV file (RFC 4180) with a header, in any encoding.

    Cells are separated by `mark`: a comma or a tab. The stream is the file, or the names of the
    table and the rows of its span.
    """
    before = file.span.before if file.span else 0
    if not (file.span and file.span.names):  # only tables in UTF-8 are divided
        stream = as_utf8(stream, file.counts, legacy=True)
    rows = (row.cells for row in _rows(_as_text(stream, file.most), mark, file.most))
    names = next(rows, [])
    if names is None:
        detail = "in the names of the table, so none of its rows is read"
        yield file.broken(NOT_CLOSED, 0, detail)
        return
    for number, cells in enumerate(rows, before + 1):
        if cells is None:
            yield file.broken(NOT_CLOSED, number, "its lines but the first are read as rows")
            continue
        if not cells:
            continue
        letters = "".join(cell for cell in cells if not cell.isascii())
        if TOO_LONG in letters:
            yield file.broken(TOO_LARGE, number, f"with a line of more than {file.most:,} bytes")
        elif len(cells) != len(names):
            yield file.broken(NOT_A_ROW, number, f"{len(cells)} of them, not {len(names)}")
        elif any("\udc80" <= letter <= "\udcff" for letter in letters):
            yield file.broken(NOT_UTF8, number, "a cell of the row")
        else:
            yield _of_row(dict(zip(names, cells, strict=True)), file, number)


def divided(path: Path, most: int, limit: int, *, mark: str) -> Iterator[FileSpan]:
    """Yield the rows that begin in each `most` bytes of a table, each with its names before it.

    All rows are parsed, as only the cells before a quote determine whether it opens a cell. All are
    in the first span if the table is not in UTF-8, or if its names have an unclosed quote.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        if not is_utf8(file.read(PROBED), legacy=True):
            yield from uncut(size, most)
            return
        file.seek(0)
        ends = collections.deque[int]()  # of the lines of the row that is read, and of later ones

        def lines() -> Iterator[str]:
            for line in _as_text(file, limit):
                ends.append(file.tell())
                yield line

        def boundaries(end: int) -> Iterator[Boundary]:
            for number, row in enumerate(rows):
                yield Boundary(end, number)
                for _ in range(row.lines):
                    end = ends.popleft()

        rows = _rows(lines(), mark, limit)
        names = next(rows, None)
        if names is None or names.cells is None:
            yield from uncut(size, most)
            return
        end = [ends.popleft() for _ in range(names.lines)][-1]
        yield from at_boundaries(boundaries(end), size, most, end)


class _Row(NamedTuple):
    """The cells of a row, None if a quote is unclosed, and the number of its lines."""

    cells: list[str] | None
    lines: int


def _rows(lines: Iterator[str], mark: str, most: int) -> Iterator[_Row]:
    """Yield each row; its cells are None if it has an unclosed quote.

    A quote is unclosed if the file ends in it or its cell exceeds `most` characters; the lines of
    such a row after the first are read as rows of their own. So a row depends on its own lines and
    those behind it, and the lines of a row that is closed are no part of another.
    """
    csv.field_size_limit(most)  # of the process; the default is 128 kB
    pending: list[str] = []  # lines to read again, the next one last
    row: list[str] = []  # lines of the row that is being read
    is_over = False

    def text() -> Iterator[str]:
        nonlocal is_over
        while (line := pending.pop() if pending else next(lines, None)) is not None:
            row.append(line)
            yield line
        is_over = True

    while True:
        is_over, reader = False, csv.reader(text(), delimiter=mark)
        try:
            for cells in reader:
                if is_over:
                    break
                count = len(row)
                row.clear()
                yield _Row(cells, count)
            else:
                return
        except csv.Error:
            pass
        pending += row[:0:-1]
        row.clear()
        yield _Row(None, 1)


def _as_text(stream: IO[bytes], most: int) -> Iterator[str]:
    """Yield lines; invalid UTF-8 becomes lone surrogates, a line over the limit TOO_LONG."""
    for number in itertools.count(1):
        line = stream.readline(most + 1)
        if not line:
            return
        if len(line) > most:
            # An odd number of quotes opens or closes a cell that spans several lines.
            quotes = sum(piece.count(b'"') for piece in rest(stream, line, number))
            yield '"' * (quotes % 2) + TOO_LONG + "\n"
            continue
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        yield line.decode(errors="surrogateescape")


def _of_row(row: Any, file: RawFile, number: int) -> CorpusDocument | BrokenRecord:
    key = file.recipe.text_key
    if not isinstance(row, dict):
        return file.broken(NO_TEXT, number, f"a {type(row).__name__}, not an object")
    if key not in row:
        return file.broken(NO_TEXT, number, f"it has {', '.join(map(str, row))[:200]}")
    text = row.pop(key)
    if not isinstance(text, str):
        return file.broken(OTHER_TYPE, number, f"a {type(text).__name__}")
    if len(text) > file.most:
        return file.broken(TOO_LARGE, number, f"a text of {len(text):,} characters")
    return CorpusDocument(mended(text, file.counts), file.name, number, _plain(row))


def _plain(value: Any) -> Any:
    """Convert a value to JSON's types: NaN and infinity become None."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
