"""Formats of records, and compression: each written once, for training and for cleaning.

A new format is a function from a stream to records, and an entry of FORMATS. `data.records` turns
records into texts for training, and `corpus.readers` into documents with metadata.

Example:
  >>> [record.value for record in json_lines(io.BytesIO(b'{"text": "a"}'), ReadOptions("a.jsonl"))]
  [{'text': 'a'}]
"""

import bz2
import dataclasses
import functools
import gzip
import io
import itertools
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxlm.data import parquet

NOT_UTF8, NOT_JSON, TOO_LARGE = "not UTF-8", "not JSON", "too large"  # kinds of faults
BYTE_ORDER_MARK = "\ufeff".encode()
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}  # command-line tools
MAX_PASSED = 2**30  # bytes of a line that are skipped; a decompression bomb has more


class TooLarge(Exception):
    """A document, a line or an archive exceeds its limit."""


class RecordFault(NamedTuple):
    """The kind of damage to a record, and the error that revealed it."""

    kind: str
    error: Exception


class Record(NamedTuple):
    """A value of a line or row, counted from 1, or what is wrong with it."""

    number: int
    value: Any  # or a RecordFault
    share: float | None = None  # of the file read so far, if the format can compute it


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """The part of a file to read."""

    name: str  # of the file, in errors
    column: str | None = None  # the only field needed; a format may read others too
    max_line: int | None = None  # bytes; a longer line is a fault
    before: int = 0  # records before the part
    groups: range | None = None  # row groups of the part
    is_in: Callable[[int], bool] | None = None  # selects lines to parse, by number


class Format(NamedTuple):
    """A reader of records, and whether it needs a stream of UTF-8 lines or a seekable file."""

    read: Callable[[IO[bytes], ReadOptions], Iterator[Record]]
    is_lines: bool


def json_lines(stream: IO[bytes], options: ReadOptions) -> Iterator[Record]:
    """Yield the value of each line that is not blank.

    Raises TooLarge if a line does not end within a gigabyte.
    """
    limit, is_in = options.max_line, options.is_in
    size = -1 if limit is None else limit + 1
    for number in itertools.count(options.before + 1):
        line = stream.readline(size)
        if not line:
            return
        if limit is not None and len(line) > limit:
            for _ in rest(stream, line, number):
                pass
            error = TooLarge(f"a line of more than {limit:,} bytes")
            yield Record(number, RecordFault(TOO_LARGE, error))
            continue
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.isspace() or not line or (is_in is not None and not is_in(number)):
            continue
        try:
            text, line = line.decode(), b""  # a line may be long and is not held three times
            value, text = json.loads(text), ""
        except UnicodeDecodeError as error:
            value = RecordFault(NOT_UTF8, error)
        except (ValueError, RecursionError) as error:
            value = RecordFault(NOT_JSON, error)
        yield Record(number, value)


def parquet_rows(stream: IO[bytes], options: ReadOptions) -> Iterator[Record]:
    """Yield the fields of each row, as `parquet.rows` reads them."""
    rows = parquet.rows(stream, options.name, options.column, options.groups)
    for number, row in enumerate(rows, options.before + 1):
        yield Record(number, row.fields, row.share)


FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), Format(json_lines, is_lines=True)),
    ".parquet": Format(parquet_rows, is_lines=False),
}


def place(name: str, number: int) -> str:
    """Return the place of a record in messages: its line, its number in a table, or the file."""
    format = FORMATS.get(kind_of(name))
    if format is None:
        return name
    return f"{name}, {'line' if format.is_lines else 'record'} {number}"


def counted(count: int, reason: str, first: str | None) -> str:
    """Return a count of records with the place of the first, if it is known."""
    number = "first " if count > 1 else ""
    return f"{count:,} {reason}" + (f" ({number}{first})" if first else "")


def rest(stream: IO[bytes], line: bytes, number: int) -> Iterator[bytes]:
    """Yield a line longer than the limit in pieces; `line` is the first.

    Raises TooLarge if it does not end within a gigabyte.
    """
    passed = 0
    while line:
        yield line
        if line.endswith(b"\n"):
            return
        line = stream.readline(2**20)
        passed += len(line)
        if passed > MAX_PASSED:
            raise TooLarge(f"line {number} has more than {MAX_PASSED:,} bytes")


@functools.lru_cache(maxsize=1024)  # it is asked for each record of a file
def kind_of(name: str) -> str:
    """Return the suffix of the format, without compression: `.jsonl` of `a.jsonl.gz`."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def is_packed(name: str) -> bool:
    """Return whether a file of this name is compressed."""
    return Path(name.lower()).suffix in COMPRESSIONS


def unpacked(stream: IO[bytes], name: str) -> IO[bytes]:
    """Decompress a stream by the suffix of its name; the caller closes both."""
    match Path(name.lower()).suffix:
        case ".gz":
            return gzip.GzipFile(fileobj=stream)  # type: ignore[return-value]
        case ".bz2":
            return bz2.BZ2File(stream)  # type: ignore[return-value]
        case ".xz":
            return lzma.LZMAFile(stream)  # type: ignore[return-value]
        case ".zst":
            return io.BufferedReader(_Zstandard(stream), 2**17)
    return stream


class ByteReader(io.RawIOBase):
    """A stream computed from another one, which it closes if it owns it."""

    def __init__(self, source: Any, *, is_owner: bool = True):
        self._source, self._is_owner = source, is_owner

    def pull(self, size: int) -> bytes | memoryview:
        """Return the next bytes, at most `size`; empty at the end."""
        raise NotImplementedError

    def readable(self) -> bool:
        """Return True: the stream can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read bytes into a buffer and return their number."""
        data = self.pull(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the stream below."""
        if self._is_owner:
            self._source.close()
        super().close()


class _Zstandard(ByteReader):
    """Concatenated Zstandard frames. The library's own reader does not report a truncated file."""

    def __init__(self, source: IO[bytes]):
        super().__init__(source)
        import zstandard

        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._ready = memoryview(b"")
        self._begun = False

    def pull(self, size: int) -> memoryview:
        while not self._ready:
            # Four bytes can unpack to 128 KiB, and all of a piece's output is held: small pieces.
            data = (self._frame.unused_data if self._frame.eof else b"") or self._source.read(2**11)
            if not data:
                if self._begun and not self._frame.eof:
                    raise EOFError("the last frame is cut")
                break
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._begun = True
            self._ready = memoryview(self._frame.decompress(data))
        data, self._ready = self._ready[:size], self._ready[size:]
        return data
