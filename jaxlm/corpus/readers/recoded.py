"""Tables in encodings other than UTF-8, recoded to UTF-8 while they are read."""

import codecs
import io
from collections import Counter
from typing import IO, Any

from jaxlm.corpus.readers.encoding import MARKS, NotText, decoded

PROBED = 2**16  # bytes at the beginning from which the encoding is detected
_PIECE = 2**17


def as_utf8(stream: IO[bytes], counts: Counter[str], *, legacy: bool) -> IO[bytes]:
    """Recode a table to UTF-8 from UTF-16 or UTF-32, and with `legacy` from legacy encodings.

    A UTF-8 table with some damaged rows has more valid than damaged letters and stays unchanged.
    Bytes that are invalid in the detected encoding become U+FFFD.
    """
    replayed = _Replayed(stream)  # type: ignore[arg-type]  # each that is opened here is buffered
    if is_utf8(replayed.begin, legacy=legacy):
        return io.BufferedReader(replayed, _PIECE)
    name = _encoding(replayed.begin)
    counts[f"read as {name}"] += 1
    return io.BufferedReader(_Recoded(replayed, name), _PIECE)


def is_utf8(begin: bytes, *, legacy: bool = False) -> bool:
    """Return whether a table with this beginning is read unchanged."""
    name = _encoding(begin)
    return name == "utf-8" or not (legacy or name.startswith("utf"))


def _encoding(begin: bytes) -> str:
    """Detect the encoding of a table; "utf-8" if it is not text, so that its rows are reported."""
    for mark, name in MARKS:
        if begin.startswith(mark):
            return name
    # Only whole letters: a line end in UTF-16 is not the end of a letter.
    lines = begin[: begin.rfind(b"\n") + 1] or begin
    whole = begin[: len(begin) // 2 * 2] if b"\0" in begin else lines
    try:
        _, name = decoded(whole)
    except NotText:
        return "utf-8"
    if not name.startswith("utf"):
        escaped = sum(
            "\udc80" <= each <= "\udcff" for each in whole.decode(errors="surrogateescape")
        )
        others = sum(each > "\x7f" for each in whole.decode(errors="ignore"))
        if others >= escaped:
            return "utf-8"
    return name


class _Replayed(io.RawIOBase):
    """A stream that is read again from the beginning after a probe; its opener closes it.

    If it is damaged, everything before the damage is read before the error is raised.
    """

    def __init__(self, stream: io.BufferedIOBase):
        self._stream = stream
        self._damage: Exception | None = None
        self.begin = b""
        try:
            # Piece by piece: in a larger read, damage to one piece would lose all.
            while len(self.begin) < PROBED and (piece := stream.read1(PROBED)):
                self.begin += piece
        except Exception as error:  # errors of zlib, lzma and zstandard have no common base
            self._damage = error
        self._ready = io.BytesIO(self.begin)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._ready.read(len(buffer))
        if not data and self._damage is not None:
            raise self._damage
        data = data or self._stream.read1(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Recoded(io.RawIOBase):
    """The same text in UTF-8."""

    def __init__(self, stream: io.RawIOBase, name: str):
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(name)("replace")
        self._ready = io.BytesIO()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not (data := self._ready.read(len(buffer))):
            piece = self._stream.read(_PIECE)
            self._ready = io.BytesIO(self._decoder.decode(piece or b"", final=not piece).encode())
            if not piece and not self._ready.getbuffer():
                return 0
        buffer[: len(data)] = data
        return len(data)
