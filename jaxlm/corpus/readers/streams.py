"""Byte streams of files, unpacked if they are compressed; they hold no more than was requested.

A compressed web archive has a gzip member for each record: a damaged member affects no other.
Source: RFC 1952, §2.2 and §2.3, for members and their header; ISO 28500, annex D, for a record in
each.
"""

import io
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from jaxlm.corpus.config import Recipe
from jaxlm.corpus.document import BrokenRecord, CorpusDocument
from jaxlm.corpus.readers.spans import FileSpan
from jaxlm.data import formats
from jaxlm.data.formats import ByteReader, TooLarge

DAMAGED = "damaged"  # kind of broken record
_BEGIN = b"\x1f\x8b\x08"  # of a member: the magic number of gzip, and deflate, the only method
_RECORD = b"WARC/"  # begin of a member's content
_HEAD_BYTES = 2**10  # of a member; they unpack to the first bytes of its record
_CHUNK = 2**16
# Bytes of a member that are searched for the next: a flipped bit can make a member swallow its
# successors, but not for long.
_LOOKED_BACK = 2**24
_GZIP = 16 + zlib.MAX_WBITS  # makes zlib expect gzip's header and checksum


Records = Iterator[CorpusDocument | BrokenRecord]


class RawFile(NamedTuple):
    """A file's name in the output, the settings, and the counts of changes to its records."""

    name: str
    recipe: Recipe
    counts: Counter[str]
    span: FileSpan | None = None  # the part to read
    # Selects records by file and number: other JSON lines are not parsed.
    is_in: Callable[[str, int], bool] = lambda file, record: True

    @property
    def most(self) -> int:
        """Size of the largest document in bytes."""
        return self.recipe.reading.document_bytes

    def broken(self, kind: str, record: int, detail: str) -> BrokenRecord:
        """Return a broken record of the file."""
        return BrokenRecord(kind, self.name, record, detail)


def unpacked(stream: IO[bytes], name: str) -> IO[bytes]:
    """Unpack a buffered stream by the suffix of its name; the caller closes both.

    Raises EOFError if it is compressed, and empty, as is a copy that never began.
    """
    if is_packed(name) and not stream.peek(1):  # type: ignore[attr-defined]
        raise EOFError("it should be compressed data, and is empty")
    if name.endswith(".gz") and kind_of(name) in (".warc", ".wet"):
        return members(stream)
    return formats.unpacked(stream, f"{name}.gz" if name.endswith(".tgz") else name)


def kind_of(name: str) -> str:
    """Return the suffix of the format, without compression: `.jsonl` of `a.jsonl.gz`."""
    return ".tar" if name.lower().endswith(".tgz") else formats.kind_of(name)


def is_packed(name: str) -> bool:
    """Return whether a file of this name is compressed."""
    return name.endswith(".tgz") or formats.is_packed(name)


def whole(stream: IO[bytes], most: int) -> bytes:
    """Read the rest of a stream. Raises TooLarge if it has more than `most` bytes."""
    data = stream.read(most + 1)
    if len(data) > most:
        raise TooLarge(f"more than {most:,} bytes")
    return data


class DamagedMember(Exception):
    """A member that cannot be unpacked."""


def members(stream: IO[bytes]) -> IO[bytes]:
    """Return a stream of the unpacked members; closed with `stream`.

    At a damaged member a read raises DamagedMember, once; the next read continues with the next
    member that contains a record.
    """
    return io.BufferedReader(_Members(stream), 2**17)


class _Members(ByteReader):
    def __init__(self, source: IO[bytes]):
        super().__init__(source)
        self._packed = b""  # input not unpacked yet
        self._seen = bytearray()  # the member so far, or its last part, and what follows
        self._unpacker: Any = None

    def pull(self, size: int) -> bytes:
        while self._packed or self._fill():
            if self._unpacker is None:
                self._packed = self._packed.lstrip(b"\0")  # zeros that pad a file
                if not self._packed:
                    continue
                self._unpacker = zlib.decompressobj(_GZIP)
                self._seen = bytearray(self._packed)
            try:
                data = self._unpacker.decompress(self._packed, size)
            except zlib.error as error:
                raise self._damaged(str(error)) from None
            if self._unpacker.eof:
                self._packed, self._unpacker = self._unpacker.unused_data, None
            else:
                self._packed = self._unpacker.unconsumed_tail
            if data:
                return data
        if self._unpacker is not None:
            raise self._damaged("the file ends in it")
        return b""

    def _fill(self) -> bool:
        """Read more input; return whether there was any."""
        self._packed = self._source.read(_CHUNK)
        self._seen += self._packed
        del self._seen[:-_LOOKED_BACK]
        return bool(self._packed)

    def _damaged(self, why: str) -> DamagedMember:
        """Seek the next member after this one's begin that unpacks to a record."""
        packed, begin, more = bytes(self._seen[1:]), 0, b"?"
        self._packed, self._unpacker = b"", None
        while True:
            offset = packed.find(_BEGIN, begin)
            if offset >= 0 and (len(packed) - offset >= _HEAD_BYTES or not more):
                if _holds_record(packed[offset : offset + _HEAD_BYTES]):
                    self._packed = packed[offset:]
                    break
                begin = offset + 1
            elif more:
                more = self._source.read(_CHUNK)
                rest = offset if offset >= 0 else max(begin, len(packed) + 1 - len(_BEGIN))
                packed, begin = packed[rest:] + more, 0
            else:
                break
        return DamagedMember(f"a gzip member: {why}")


def _holds_record(head: bytes) -> bool:
    try:
        return zlib.decompressobj(_GZIP).decompress(head, len(_RECORD)) == _RECORD
    except zlib.error:
        return False
