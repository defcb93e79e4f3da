"""Web archives: pages as a crawler received them (WARC) and their text (WET).

Source: ISO 28500, "The WARC Format 1.1": a record is a version line, named fields, an empty line,
Content-Length bytes, two empty lines. In a `.gz` each record is a gzip member of its own.
"""

import dataclasses
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import IO

from jaxlm.corpus.config import Recipe
from jaxlm.corpus.document import BrokenRecord, CorpusDocument
from jaxlm.corpus.readers.encoding import NotText, decoded
from jaxlm.corpus.readers.main_text import charset, main_text
from jaxlm.corpus.readers.streams import DAMAGED, DamagedMember, whole
from jaxlm.data.formats import TOO_LARGE, TooLarge

NOT_A_RECORD, CUT = "no WARC record", "a WARC record that is cut"
NOT_HTTP, NOT_TEXT = "no HTTP response", "not text"
MOST_FIELDS = 2**16  # bytes of the header fields of a record or response
TEXTS = "text/plain", "text/markdown"
PAGES = "text/html", "application/xhtml+xml"


class _Truncated(Exception):
    """The file ends inside a record."""


def records(
    stream: IO[bytes], name: str, recipe: Recipe, counts: Counter[str]
) -> Iterator[CorpusDocument | BrokenRecord]:
    """Yield the pages and texts of an archive; count other records and responses without text."""
    number = 0
    while True:
        try:
            for number_read, each in _records(stream, name, number, recipe, counts):
                number = number_read
                if each is not None:
                    yield each
            return
        except DamagedMember as error:  # the stream continues after it
            number += 1
            yield BrokenRecord(DAMAGED, name, number, str(error))


def _records(
    stream: IO[bytes], name: str, number: int, recipe: Recipe, counts: Counter[str]
) -> Iterator[tuple[int, CorpusDocument | BrokenRecord | None]]:
    """Yield the records after the given number, with theirs; None for one that is not text."""
    most, is_lost = recipe.reading.document_bytes, False
    while line := stream.readline(MOST_FIELDS):
        if not line.strip():
            continue
        if not line.startswith(b"WARC/"):
            # Something between two records: a wrong length. The next begins at a version line.
            if not is_lost:
                number += 1
                yield (
                    number,
                    BrokenRecord(NOT_A_RECORD, name, number, f"it begins with {line[:40]!r}"),
                )
            is_lost = True
            continue
        number, is_lost = number + 1, False
        try:
            fields = _fields(stream)
            length = int(fields.get("content-length", ""))
            if length < 0:
                raise ValueError(f"a length of {length}")
        except ValueError as error:
            yield number, BrokenRecord(NOT_A_RECORD, name, number, str(error)[:200])
            is_lost = True
            continue
        except _Truncated:
            yield number, BrokenRecord(CUT, name, number, "the file ends among its fields")
            return
        if length > most:
            yield number, BrokenRecord(TOO_LARGE, name, number, f"{length:,} bytes")
            _pass(stream, length)
            continue
        block = stream.read(length)
        if len(block) < length:
            yield (
                number,
                BrokenRecord(CUT, name, number, f"{len(block):,} of {length:,} bytes are there"),
            )
            return
        yield number, _document(fields, block, name, number, most, counts)


def _document(
    fields: dict[str, str], block: bytes, name: str, number: int, most: int, counts: Counter[str]
) -> CorpusDocument | BrokenRecord | None:
    kind = fields.get("warc-type", "")
    meta = {
        "url": fields.get("warc-target-uri", "").strip("<>"),
        "date": fields.get("warc-date", ""),
    }
    try:
        if kind == "conversion":
            return CorpusDocument(decoded(block)[0], name, number, meta)
        if kind != "response":
            counts[f"passed over: WARC {kind}"] += 1
            return None
        page = _http(block, most)
    except NotText as error:
        return BrokenRecord(NOT_TEXT, name, number, str(error))
    except TooLarge as error:
        return BrokenRecord(TOO_LARGE, name, number, str(error))
    except (ValueError, EOFError, OSError, zlib.error) as error:
        return BrokenRecord(NOT_HTTP, name, number, f"{type(error).__name__}: {str(error)[:200]}")
    if page.status != 200 or page.kind not in (*TEXTS, *PAGES):
        what = page.kind or "of no type" if page.status == 200 else f"status {page.status}"
        counts[f"passed over: answer {what}"] += 1
        return None
    try:
        text, encoding = decoded(page.body, page.charset or charset(page.body))
    except NotText as error:
        return BrokenRecord(NOT_TEXT, name, number, str(error))
    if encoding != "utf-8":
        meta["encoding"] = encoding
    if page.kind in PAGES:
        meta["title"], text = main_text(text, counts)
    return CorpusDocument(text, name, number, meta)


@dataclasses.dataclass(frozen=True)
class _HttpResponse:
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


def _pass(stream: IO[bytes], length: int) -> None:
    """Skip bytes without holding them."""
    while length > 0 and (piece := stream.read(min(length, 2**20))):
        length -= len(piece)
