"""A packed web archive, each record a gzip member of its own: a damaged member costs no other.

Source: RFC 1952, §2.2 and §2.3, for members and how they begin; ISO 28500, annex D, for a record in each.
"""

import io
import zlib
from typing import IO, Any

_BEGIN = b"\x1f\x8b\x08"  # of a member: two bytes that say gzip, and deflate, the only method
_RECORD = b"WARC/"  # of what a member holds
_HEAD_BYTES = 2**10  # of a member, that unpack to the first bytes of its record
_CHUNK = 2**16
# Bytes of a member in which the next is looked for: a flipped bit can make a member swallow those after it, but not for long.
_LOOKED_BACK = 2**24
_GZIP = 16 + zlib.MAX_WBITS  # zlib's word for gzip's head and check


class DamagedMember(Exception):
    """A member that cannot be unpacked."""


def members(stream: IO[bytes]) -> IO[bytes]:
    """The bytes of one member after another; closed with `stream`.

    Where one is damaged, a read raises DamagedMember, once. The next read is of the next member that holds a record.
    """
    return io.BufferedReader(_Members(stream), 2**17)


class _Members(io.RawIOBase):
    def __init__(self, stream: IO[bytes]):
        self._stream = stream
        self._packed = b""  # what the unpacker has not had
        self._seen = bytearray()  # the member from its begin on, or its last part, and what follows
        self._unpacker: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._packed or self._fill():
            if self._unpacker is None:
                self._packed = self._packed.lstrip(b"\0")  # zeros that pad a file are no member
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
        """Reads on, and says whether there was more."""
        self._packed = self._stream.read(_CHUNK)
        self._seen += self._packed
        del self._seen[:-_LOOKED_BACK]
        return bool(self._packed)

    def _damaged(self, why: str) -> DamagedMember:
        """Goes to the next place behind the begin of this member where one begins that unpacks to a record."""
        packed, begin, more = bytes(self._seen[1:]), 0, b"?"
        self._packed, self._unpacker = b"", None
        while True:
            at = packed.find(_BEGIN, begin)
            if at >= 0 and (len(packed) - at >= _HEAD_BYTES or not more):
                if _holds_record(packed[at : at + _HEAD_BYTES]):
                    self._packed = packed[at:]
                    break
                begin = at + 1
            elif more:
                more = self._stream.read(_CHUNK)
                kept = at if at >= 0 else max(begin, len(packed) + 1 - len(_BEGIN))
                packed, begin = packed[kept:] + more, 0
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
