"""Web archives: pages as a crawler received them (WARC) and their text (WET).

Source: ISO 28500, "The WARC Format 1.1": a record is a version line, named fields, an empty line,
Content-Length bytes, two empty lines. In a `.gz` each record is a gzip member of its own.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from jaxlm.corpus.document import BrokenRecord, CorpusDocument
from jaxlm.corpus.readers.encoding import NOT_TEXT, NotText, decoded
from jaxlm.corpus.readers.main_text import charset, main_text
from jaxlm.corpus.readers.spans import Boundary, FileSpan, at_boundaries
from jaxlm.corpus.readers.streams import DAMAGED, DamagedMember, RawFile, Records, whole
from jaxlm.data.formats import TOO_LARGE, TooLarge

NOT_A_RECORD, CUT = "no WARC record", "a WARC record that is cut"
NOT_HTTP = "no HTTP response"
MOST_FIELDS = 2**16  # bytes of the header fields of a record or response
TEXTS = "text/plain", "text/markdown"
PAGES = "text/html", "application/xhtml+xml"


class _Truncated(Exception):
    """The file ends inside a record."""


class _Fault(NamedTuple):
    """The kind of damage to a record, and its detail."""

    kind: str
    detail: str


class _RawRecord(NamedTuple):
    """The fields and the block of a record, or its damage."""

    number: int
    fields: dict[str, str]
    content: bytes | _Fault
    begin: int | None = None  # bytes of the file before it, if they are counted and it has a length


def records(stream: IO[bytes], file: RawFile) -> Records:
    """Yield the pages and texts of an archive; count other records and responses without text.

    The stream is the file, or the bytes of its span.
    """
    for raw in _raw_records(stream, file.most, file.span.before if file.span else 0):
        if isinstance(raw.content, _Fault):
            yield file.broken(raw.content.kind, raw.number, raw.content.detail)
        elif (record := _document(raw.fields, raw.content, raw.number, file)) is not None:
            yield record


def divided(path: Path, most: int, limit: int) -> Iterator[FileSpan]:
    """Yield the records that begin in each `most` bytes of an archive that is not compressed.

    A record with a length can be read from its version line on: the lines in front of it have no
    effect on it.
    """
    with open(path, "rb") as file:
        begins = (
            Boundary(each.begin, each.number - 1)
            for each in _raw_records(file, limit, 0, is_located=True)
            if each.begin is not None
        )
        yield from at_boundaries(begins, path.stat().st_size, most)


def _raw_records(
    stream: IO[bytes], most: int, number: int, *, is_located: bool = False
) -> Iterator[_RawRecord]:
    """Yield the records behind the record `number`; a block of more than `most` bytes is damage."""
    is_lost = False  # True behind something that is no record
    begin = None
    while True:
        try:
            if not (line := stream.readline(MOST_FIELDS)):
                return
            if not line.strip():
                continue
            if not line.startswith(b"WARC/"):
                # Something between two records: a wrong length. The next begins at a version line.
                if not is_lost:
                    number += 1
                    fault = _Fault(NOT_A_RECORD, f"it begins with {line[:40]!r}")
                    yield _RawRecord(number, {}, fault)
                is_lost = True
                continue
            is_lost = False
            if is_located:
                begin = stream.tell() - len(line)
            try:
                fields = _fields(stream)
                length = int(fields.get("content-length", ""))
                if length < 0:
                    raise ValueError(f"a length of {length}")
            except ValueError as error:
                number, is_lost = number + 1, True
                yield _RawRecord(number, {}, _Fault(NOT_A_RECORD, str(error)[:200]))
                continue
            except _Truncated:
                yield _RawRecord(number + 1, {}, _Fault(CUT, "the file ends among its fields"))
                return
            if length > most:
                number += 1
                fault = _Fault(TOO_LARGE, f"{length:,} bytes")
                yield _RawRecord(number, fields, fault, begin)
                while length > 0 and (piece := stream.read(min(length, 2**20))):
                    length -= len(piece)
                continue
            block = stream.read(length)
            number += 1
            if len(block) < length:
                fault = _Fault(CUT, f"{len(block):,} of {length:,} bytes are there")
                yield _RawRecord(number, fields, fault, begin)
                return
            yield _RawRecord(number, fields, block, begin)
        except DamagedMember as error:  # the stream continues after it
            number, is_lost = number + 1, False
            yield _RawRecord(number, {}, _Fault(DAMAGED, str(error)))


def _document(
    fields: dict[str, str], block: bytes, number: int, file: RawFile
) -> CorpusDocument | BrokenRecord | None:
    """Return the document of a record; None for one that is not text."""
    kind = fields.get("warc-type", "")
    url, date = fields.get("warc-target-uri", "").strip("<>"), fields.get("warc-date", "")
    meta = {"url": url, "date": date}
    try:
        if kind == "conversion":
            return CorpusDocument(decoded(block)[0], file.name, number, meta)
        if kind != "response":
            file.counts[f"passed over: WARC {kind}"] += 1
            return None
        page = _http(block, file.most)
        if page.status != 200 or page.kind not in (*TEXTS, *PAGES):
            what = page.kind or "of no type" if page.status == 200 else f"status {page.status}"
            file.counts[f"passed over: answer {what}"] += 1
            return None
        text, encoding = decoded(page.body, page.charset or charset(page.body))
    except NotText as error:
        return file.broken(NOT_TEXT, number, str(error))
    except TooLarge as error:
        return file.broken(TOO_LARGE, number, str(error))
    except (ValueError, EOFError, OSError, zlib.error) as error:
        return file.broken(NOT_HTTP, number, f"{type(error).__name__}: {str(error)[:200]}")
    if encoding != "utf-8":
        meta["encoding"] = encoding
    if page.kind in PAGES:
        meta["title"], text = main_text(text, file.counts)
    return CorpusDocument(text, file.name, number, meta)


class _HttpResponse(NamedTuple):
    status: int
    kind: str
    charset: str
    body: bytes


def _http(block: bytes, most: int) -> _HttpResponse:
    """Parse an HTTP response: RFC 9112 for format and chunks, RFC 9110 §8.4 for content codings."""
    stream = io.BytesIO(block)
    words = stream.readline(MOST_FIELDS).split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        raise ValueError("no status line")
    try:
        fields = _fields(stream)
    except _Truncated:
        raise ValueError("it ends among its fields") from None
    body = stream.read()
    if "chunked" in fields.get("transfer-encoding", "").lower():
        body = _unchunked(body)
    coding = fields.get("content-encoding", "").strip().lower()
    if coding in ("gzip", "x-gzip"):
        with gzip.open(io.BytesIO(body)) as packed:
            body = whole(packed, most)  # type: ignore[arg-type]
    elif coding == "deflate":
        unpacking = zlib.decompressobj()
        body = unpacking.decompress(body, most)
        if unpacking.unconsumed_tail:
            raise TooLarge(f"more than {most:,} bytes")
    elif coding not in ("", "identity"):
        raise ValueError(f"packed as {coding}")
    kind, _, parameters = fields.get("content-type", "").partition(";")
    encoding = parameters.lower().partition("charset=")[2].partition(";")[0].strip(" \"'")
    return _HttpResponse(int(words[1]), kind.strip().lower(), encoding, body)


def _unchunked(body: bytes) -> bytes:
    """Join the chunks of a body; crawlers may have joined them and kept the field."""
    stream, chunks = io.BytesIO(body), []
    while line := stream.readline(MOST_FIELDS):
        try:
            length = int(line.partition(b";")[0], 16)
        except ValueError:
            return body
        if length <= 0:
            break
        chunks.append(stream.read(length))
        stream.readline(MOST_FIELDS)
    return b"".join(chunks)


def _fields(stream: IO[bytes]) -> dict[str, str]:
    """Read named fields up to an empty line; names in lower case."""
    fields: dict[str, str] = {}
    size = 0
    while line := stream.readline(MOST_FIELDS):
        if not line.strip():
            return fields
        size += len(line)
        name, colon, value = line.decode(errors="replace").partition(":")
        if not colon or size > MOST_FIELDS:
            raise ValueError(f"a field reads {line[:40]!r}")
        fields[name.strip().lower()] = value.strip()
    raise _Truncated
