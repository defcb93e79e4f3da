"""Byte streams of files, unpacked if they are compressed; they hold no more than was requested."""

import bz2
import gzip
import io
import itertools
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

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


_BEGIN = b"\x1f\x8b\x08"  # of a member: the magic number of gzip, and deflate, the only method
_RECORD = b"WARC/"  # begin of a member's content
_HEAD_BYTES = 2**10  # of a member; they unpack to the first bytes of its record
_CHUNK = 2**16
# Bytes of a member that are searched for the next: a flipped bit can make a member swallow its
# successors, but not for long.
_LOOKED_BACK = 2**24
_GZIP = 16 + zlib.MAX_WBITS  # makes zlib expect gzip's header and checksum


class DamagedMember(Exception):
    """A member that cannot be unpacked."""


def members(stream: IO[bytes]) -> IO[bytes]:
    """Return a stream of the unpacked members; closed with `stream`.

    At a damaged member a read raises DamagedMember, once; the next read continues with the next
    member that contains a record.
    """
    return io.BufferedReader(_Members(stream), 2**17)


class _Members(io.RawIOBase):
    def __init__(self, stream: IO[bytes]):
        self._stream = stream
        self._packed = b""  # input not unpacked yet
        self._seen = bytearray()  # the member so far, or its last part, and what follows
        self._unpacker: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._packed or self._fill():
            if self._unpacker is None:
                self._packed = self._packed.lstrip(b"\0")  # zeros that pad a file
                if not self._packed:
                    continue
                self._unpacker = zlib.decompressobj(_GZIP)
                self._seen = bytearray(self._packed)
            try:
                data = self._unpacker.decompress(self._packed, len(buffer))
            except zlib.error as error:
                raise self._damaged(str(error)) from None
            if self._unpacker.eof:
                self._packed, self._unpacker = self._unpacker.unused_data, None
            else:
                self._packed = self._unpacker.unconsumed_tail
            if data:
                buffer[: len(data)] = data
                return len(data)
        if self._unpacker is not None:
            raise self._damaged("the file ends in it")
        return 0

    def _fill(self) -> bool:
        """Read more input; return whether there was any."""
        self._packed = self._stream.read(_CHUNK)
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
                more = self._stream.read(_CHUNK)
                rest = offset if offset >= 0 else max(begin, len(packed) + 1 - len(_BEGIN))
                packed, begin = packed[rest:] + more, 0
            else:
                break
        return DamagedMember(f"a gzip member: {why}")

    def close(self) -> None:
        self._stream.close()
        super().close()


def _holds_record(head: bytes) -> bool:
    try:
        return zlib.decompressobj(_GZIP).decompress(head, len(_RECORD)) == _RECORD
    except zlib.error:
        return False
