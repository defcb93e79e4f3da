"""Decoding of text whose encoding is unknown, whole or as a stream."""

import codecs
import io
import re
import unicodedata
from collections import Counter
from typing import IO, Any

from jaxlm.data.formats import ByteReader
from jaxlm.data.records import CONTROLS

# The longer marks first: the one of UTF-32 begins with the one of UTF-16.
MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
LAST_RESORT = "cp1252"  # the most common encoding of text without mark, declaration or UTF-8
# Other legacy encodings: of Europe and the Middle East, then those of several bytes a character.
LEGACY = (
    f"{LAST_RESORT} cp1250 iso8859_2 cp1251 koi8_r koi8_u iso8859_5 cp866 cp1253 iso8859_7 cp1257"
    " cp1254 cp1255 cp1256 cp932 euc_jp gb18030 big5 cp949"
).split()
# Letters outside ASCII in languages of Latin script, by encoding; the first of equals is taken.
# French, German, Spanish, Portuguese, Italian, Swedish, Danish, Icelandic, Dutch, Catalan; Polish,
# Czech, Slovak, Hungarian, Romanian, Croatian; Lithuanian, Latvian, Estonian; Turkish.
_WESTERN = (
    *("àâæçéèêëîïôœùûüÿ", "äöüß", "áéíñóúü", "àáâãçéêíóôõúü", "àèéìíîòóùú"),
    *("åäöéü", "æøåéö", "áðéíóúýþæö", "éèëïóöüá", "àçèéíïòóúü"),
)
_CENTRAL = (
    *("ąćęłńóśźż", "áčďéěíňóřšťúůýž", "áäčďéíĺľňóôŕšťúýž"),
    *("áéíóöőúüű", "ăâîşţ", "čćđšž"),
)
ALPHABETS = {
    LAST_RESORT: _WESTERN,
    "cp1250": _CENTRAL,
    "iso8859_2": _CENTRAL,
    "cp1257": ("ąčęėįšųūž", "āčēģīķļņšūž", "äõöüšž"),
    "cp1254": ("çğıöşüâîû",),
}
PROBED = 2**16  # bytes from which an encoding is detected
_NO_TEXT = ("Cc", "Cn", "Co")  # categories of Unicode: controls, unassigned, private use
_MAGIC = (b"%PDF-", b"PK\x03\x04", b"\x1f\x8b", b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"\x7fELF")
MAX_HIGH_LETTERS = 0.25  # share of high halves of UTF-16, if the bytes are valid UTF-8 as well
_FEW = 8  # letters outside ASCII; fewer do not identify an encoding
_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")  # PEP 263
_PIECE = 2**17
NOT_TEXT = "not text"  # kind of broken record


class NotText(Exception):
    """Bytes that are not text in any encoding that was tried."""


def decoded(data: bytes, declared: str = "") -> tuple[str, str]:
    """Return the text of bytes and its encoding.

    In this order: byte order mark, UTF-8, the declared encoding, statistics of letters, cp1252.
    Raises NotText if the bytes look like a picture, a program or other binary data.
    """
    for mark, name in MARKS:
        if data.startswith(mark):
            try:
                return data[len(mark) :].decode(name), name
            except UnicodeDecodeError as error:
                raise NotText(f"marked as {name}, but {error.reason}") from error
    if data.startswith(_MAGIC):
        raise NotText(f"it begins as a binary file: {data[:4]!r}")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return _guessed(data, declared, error.start)
    # JSON and text may contain a control character or two; binary files are full of them.
    if _share_of_controls(data) > 0.05:
        if (name := _unmarked(data)) and not _has_letters_in_high_halves(data, name):
            return data.decode(name), name
        raise NotText("it is full of control characters")
    return text, "utf-8"


def python_cookie(data: bytes) -> str:
    """Return the encoding declared in the first two lines of Python source, or an empty string."""
    for line in data.split(b"\n", 2)[:2]:
        if match := _COOKIE.match(line):
            return match[1].decode()
    return ""


def _guessed(data: bytes, declared: str, start: int) -> tuple[str, str]:
    """Decode bytes that are not UTF-8 from the offset `start` on."""
    if _share_of_controls(data) > 0:
        if name := _unmarked(data):
            return data.decode(name), name
        raise NotText("it contains control characters and is not UTF-8")
    # The encoding is detected only if the declared one fails: detection is slow.
    for choose in (lambda: declared, lambda: _legacy(data, start), lambda: LAST_RESORT):
        try:
            name = choose()
            return data.decode(name), name.lower()
        except (LookupError, ValueError):  # unknown encoding, not one of text, or not decodable
            continue
    raise NotText(f"it is not UTF-8 and not {LAST_RESORT}")


def _legacy(data: bytes, start: int) -> str:
    """Return the encoding by the letters of the text; cp1252 unless another one fits better."""
    import charset_normalizer

    # The first lines may name an encoding. If they are many, they are ASCII without information.
    begin = 0 if start < PROBED // 2 else data.rfind(b"\n", 0, start) + 1
    probe = data[begin : begin + PROBED]
    if begin + PROBED < len(data):  # a line end never splits a character of several bytes
        probe = probe[: probe.rfind(b"\n") + 1] or probe
    options: dict[str, Any] = {"cp_isolation": LEGACY, "enable_fallback": False}
    best = charset_normalizer.from_bytes(probe, **options).best()
    others = len(probe) - len(probe.translate(None, bytes(range(128, 256))))
    is_known = others >= min(_FEW, len(probe) / 4)  # a word or two fit any encoding
    if best is not None and is_known and best.encoding not in ALPHABETS:
        return best.encoding
    # The library confuses encodings of Latin script, also for whole pages.
    return max(ALPHABETS, key=lambda name: _share_of_alphabet(probe, name))


def _share_of_alphabet(probe: bytes, encoding: str) -> float:
    """Return the share of letters outside ASCII that are in the alphabet of one language.

    Bytes without a character, and control characters, are letters of none.
    """
    text = probe.decode(encoding, "replace").lower()
    letters = [
        c for c in text if "\x7f" < c < "\xa0" or c == "\ufffd" or (c > "\xa0" and c.isalpha())
    ]
    if not letters:
        return 0.0
    counts = Counter(letters)
    known = (sum(counts[c] for c in alphabet) for alphabet in ALPHABETS[encoding])
    return max(known) / len(letters)


def _unmarked(data: bytes) -> str:
    """Return which UTF-16 the bytes without a mark are; empty if a character would not be text.

    Text in the wrong byte order almost always has a control or unassigned character; if not, spaces
    and line ends decide. These have a zero byte, and every text contains some.
    """
    candidates = []
    if b"\0" not in data:
        return ""
    for name in ("utf-16-le", "utf-16-be"):
        try:
            text = data.decode(name)
        except UnicodeDecodeError:
            continue
        if all(c in "\t\n\f\r\x1b" or unicodedata.category(c) not in _NO_TEXT for c in set(text)):
            candidates.append((text.count(" ") + text.count("\n"), name))
    return max(candidates)[1] if candidates else ""


def _has_letters_in_high_halves(data: bytes, name: str) -> bool:
    """Return whether bytes that are valid UTF-8 are text with NUL and not UTF-16.

    In ASCII with NUL the high halves are letters. In UTF-16 that is also valid UTF-8 nearly all of
    the high halves are below 0x20: the characters are below U+2000.
    """
    high = data[1::2] if name == "utf-16-le" else data[::2]
    return len(high.translate(None, bytes(range(32)))) > MAX_HIGH_LETTERS * len(high)


def _share_of_controls(data: bytes) -> float:
    probe = data[:PROBED]
    return 1 - len(probe.translate(None, CONTROLS)) / len(probe) if probe else 0.0


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
        letters = whole.decode(errors="surrogateescape")
        escaped = sum("\udc80" <= each <= "\udcff" for each in letters)
        others = sum(each > "\x7f" for each in whole.decode(errors="ignore"))
        if others >= escaped:
            return "utf-8"
    return name


class _Replayed(ByteReader):
    """A stream that is read again from the beginning after a probe; its opener closes it.

    If it is damaged, everything before the damage is read before the error is raised.
    """

    def __init__(self, source: io.BufferedIOBase):
        super().__init__(source, is_owner=False)
        self._damage: Exception | None = None
        self.begin = b""
        try:
            # Piece by piece: in a larger read, damage to one piece would lose all.
            while len(self.begin) < PROBED and (piece := source.read1(PROBED)):
                self.begin += piece
        except Exception as error:  # errors of zlib, lzma and zstandard have no common base
            self._damage = error
        self._ready = io.BytesIO(self.begin)

    def pull(self, size: int) -> bytes:
        data = self._ready.read(size)
        if not data and self._damage is not None:
            raise self._damage
        return data or self._source.read1(size)


class _Recoded(ByteReader):
    """The same text in UTF-8."""

    def __init__(self, source: io.RawIOBase, name: str):
        super().__init__(source, is_owner=False)
        self._decoder = codecs.getincrementaldecoder(name)("replace")
        self._ready = io.BytesIO()

    def pull(self, size: int) -> bytes:
        while not (data := self._ready.read(size)):
            piece = self._source.read(_PIECE)
            self._ready = io.BytesIO(self._decoder.decode(piece or b"", final=not piece).encode())
            if not piece and not self._ready.getbuffer():
                break
        return data
