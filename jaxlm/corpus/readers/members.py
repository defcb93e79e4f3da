"""A compressed web archive with a gzip member for each record: a damaged member affects no other.

Source: RFC 1952, §2.2 and §2.3, for members and their header; ISO 28500, annex D, for a record in
each.
"""

import io
import zlib
from typing import IO, Any

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
