"""Text of bytes whose encoding nobody is sure of."""

import codecs
import re
import unicodedata
from collections.abc import Iterator

# The longer marks first: that of UTF-32 begins as that of UTF-16 does.
MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
LAST_RESORT = "cp1252"  # which most text that is neither marked, declared nor UTF-8 was written in
# What else such text was written in: Europe's, the Middle East's, then those of several bytes a character.
LEGACY = [
    *(
        LAST_RESORT,
        "cp1250",
        "iso8859_2",
        "cp1251",
        "koi8_r",
        "koi8_u",
        "iso8859_5",
        "cp866",
        "cp1253",
        "iso8859_7",
        "cp1257",
    ),
    *("cp1254", "cp1255", "cp1256", "cp932", "euc_jp", "gb18030", "big5", "cp949"),
]
UNMARKED = "utf-16-le", "utf-16-be"
_PROBED = 2**16
_CONTROLS = bytes(set(range(32)) - {9, 10, 12, 13, 27})
_NO_TEXT = (
    "Cc",
    "Cn",
    "Co",
)  # categories of Unicode: controls, characters that are none, of private use
_MAGIC = (b"%PDF-", b"PK\x03\x04", b"\x1f\x8b", b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"\x7fELF")
_FEW = 8  # letters that are not ASCII, which say nothing of their encoding
_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")  # PEP 263


class NotText(Exception):
    """Bytes that are no text in any encoding that was tried."""


def decoded(data: bytes, declared: str = "") -> tuple[str, str]:
    """The text of bytes and the encoding it was in: by mark, UTF-8, as declared, by its letters, or else cp1252.

    Raises:
      NotText: where they look like a picture, a program or the like.
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
    # JSON and text may hold a control character or two; binary files are full of them.
    if _share_of_controls(data) > 0.05:
        if name := _unmarked(data):
            return data.decode(name), name
        raise NotText("it is full of control characters")
    return text, "utf-8"


def python_cookie(data: bytes) -> str:
    """The encoding that the first two lines of Python source declare; nothing where they do not."""
    for line in data.split(b"\n", 2)[:2]:
        if match := _COOKIE.match(line):
            return match[1].decode()
    return ""


def _guessed(data: bytes, declared: str, start: int) -> tuple[str, str]:
    """What is not UTF-8 from the byte `start` on."""
    if _share_of_controls(data) > 0:
        if name := _unmarked(data):
            return data.decode(name), name
        raise NotText("it holds control characters and is not UTF-8")
    for name in _names(data, declared, start):
        try:
            return data.decode(name), name.lower()
        except (LookupError, ValueError):  # no such encoding, no encoding of text, not in it
            continue
    raise NotText(f"it is neither UTF-8 nor {LAST_RESORT}")


def _names(data: bytes, declared: str, start: int) -> Iterator[str]:
    if declared:
        yield declared
    yield _legacy(data, start)
    yield LAST_RESORT


def _legacy(data: bytes, start: int) -> str:
    """The encoding in which text looks most like a language, or cp1252 where none does more than it."""
    import charset_normalizer

    # Its first lines may name an encoding. Where there are many, they are ASCII, and tell nothing else.
    begin = 0 if start < _PROBED // 2 else data.rfind(b"\n", 0, start) + 1
    probe = data[begin : begin + _PROBED]
    if begin + _PROBED < len(data):  # a character of several bytes is cut at no line's end
        probe = probe[: probe.rfind(b"\n") + 1] or probe
    found = charset_normalizer.from_bytes(probe, cp_isolation=LEGACY, enable_fallback=False)
    best = found.best()
    others = len(probe) - len(probe.translate(None, bytes(range(128, 256))))
    if best is None or others < min(_FEW, len(probe) / 4):
        return LAST_RESORT  # a word or two in other letters fit any
    for match in found:
        is_last_resort = LAST_RESORT in match.could_be_from_charset
        if is_last_resort and match.coherence >= best.coherence and match.chaos <= best.chaos:
            return LAST_RESORT
    # The two differ in letters that cp1250 has from 0x80 to 0x9f, where ISO 8859 has none.
    has_upper = len(probe) != len(probe.translate(None, bytes(range(128, 160))))
    is_either = best.encoding == "cp1250" and not has_upper
    return "iso8859_2" if is_either else best.encoding


def _unmarked(data: bytes) -> str:
    """Which UTF-16 bytes without a mark are; nothing where some character would be a control, or of no alphabet.

    Text in the wrong order of bytes is almost always one or the other; where it is not, spaces and ends of lines decide. These
    have a byte of zero, and no text is without.
    """
    found = []
    if b"\0" not in data:
        return ""
    for name in UNMARKED:
        try:
            text = data.decode(name)
        except UnicodeDecodeError:
            continue
        if all(c in "\t\n\f\r\x1b" or unicodedata.category(c) not in _NO_TEXT for c in set(text)):
            found.append((text.count(" ") + text.count("\n"), name))
    return max(found)[1] if found else ""


def _share_of_controls(data: bytes) -> float:
    probe = data[:_PROBED]
    return 1 - len(probe.translate(None, _CONTROLS)) / len(probe) if probe else 0.0
