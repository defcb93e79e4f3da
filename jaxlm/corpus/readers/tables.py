"""Readers of formats with a document in each row: those of `data.formats`, and CSV.

The other fields of a row become metadata.
"""

import csv
import functools
import io
import itertools
import math
from collections.abc import Iterator
from typing import IO, Any

from jaxlm.corpus.document import BrokenRecord, CorpusDocument
from jaxlm.corpus.readers.encoding import as_utf8
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

    Cells are separated by `mark`: a comma or a tab.
    """
    csv.field_size_limit(file.most)  # of the process; the default is 128 kB
    rows = _rows(_as_text(as_utf8(stream, file.counts, legacy=True), file.most), mark)
    names = next(rows, [])
    if names is None:
        detail = "in the names of the table, so none of its rows is read"
        yield file.broken(NOT_CLOSED, 0, detail)
        return
    for number, cells in enumerate(rows, 1):
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


def _rows(lines: Iterator[str], mark: str) -> Iterator[list[str] | None]:
    """Yield the cells of each row; None for a row with an unclosed quote.

    A quote is unclosed if the file ends in it or its cell exceeds the limit; the lines of such a
    row after the first are read as rows of their own.
    """
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
                row.clear()
                yield cells
            else:
                return
        except csv.Error:
            pass
        pending += row[:0:-1]
        row.clear()
        yield None


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
