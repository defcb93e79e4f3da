"""Tables in other encodings than UTF-8, as bytes of UTF-8: a stream is told by its begin, and recoded as it is read."""

import codecs
import io
from collections import Counter
from typing import IO, Any

from jaxlm.corpus.readers.encoding import MARKS, NotText, decoded

PROBED = 2**16  # bytes of the begin, by which the encoding of all is told
_PIECE = 2**17


def as_utf8(stream: IO[bytes], counts: Counter[str], *, legacy: bool) -> IO[bytes]:
    """The bytes of a table in UTF-8: it may be in UTF-16 or UTF-32, and with `legacy` in an encoding of its letters' own.

    A table in UTF-8 with damaged rows has whole letters beside the damaged ones, and stays as it is. Bytes that are none of
    the encoding that was found become U+FFFD.
    """
    again = _Again(stream)  # type: ignore[arg-type]  # each that is opened here is buffered
    if is_utf8(again.begin, legacy=legacy):
        return io.BufferedReader(again, _PIECE)
    name = _encoding(again.begin)
    counts[f"read as {name}"] += 1
    return io.BufferedReader(_Recoded(again, name), _PIECE)


def is_utf8(begin: bytes, *, legacy: bool = False) -> bool:
    """Whether a table that begins so is read as it stands."""
    name = _encoding(begin)
    return name == "utf-8" or not (legacy or name.startswith("utf"))


def _encoding(begin: bytes) -> str:
    """What the encoding of a table is, by its begin; UTF-8 where it is no text, which its rows will show."""
    for mark, name in MARKS:
        if begin.startswith(mark):
            return name
    # As far as it has whole letters: in UTF-16 an end of a line is not the end of a letter.
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


class _Again(io.RawIOBase):
    """A stream that is read from its begin again after a look at that; closed by who opened it.

    Where it is damaged, all that comes before the damage is read before it is said.
    """

    def __init__(self, stream: io.BufferedIOBase):
        self._stream = stream
        self._damage: Exception | None = None
        self.begin = b""
        try:
            # A piece at a time: of several that are read together the damage of one would lose all.
            while len(self.begin) < PROBED and (piece := stream.read1(PROBED)):
                self.begin += piece
        except Exception as error:  # zlib's, lzma's, zstandard's: they share no parent
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
