"""Text of bytes whose encoding nobody is sure of."""

import codecs
import re

# The longer marks first: that of UTF-32 begins as that of UTF-16 does.
MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
LAST_RESORT = "cp1252"  # which most text that is neither marked, declared nor UTF-8 was written in
_PROBED = 2**16
_CONTROLS = bytes(set(range(32)) - {9, 10, 12, 13, 27})
_MAGIC = (b"%PDF-", b"PK\x03\x04", b"\x1f\x8b", b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"\x7fELF")
_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")  # PEP 263


class NotText(Exception):
    """Bytes that are no text in any encoding that was tried."""


def decoded(data: bytes, declared: str = "") -> tuple[str, str]:
    """The text of bytes and the encoding it was in: by mark, UTF-8, as declared, or else cp1252.

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
    except UnicodeDecodeError:
        return _guessed(data, declared)
    # JSON and text may hold a control character or two; binary files are full of them.
    if _share_of_controls(data) > 0.05:
        raise NotText("it is full of control characters")
    return text, "utf-8"


def python_cookie(data: bytes) -> str:
    """The encoding that the first two lines of Python source declare; nothing where they do not."""
    for line in data.split(b"\n", 2)[:2]:
        if match := _COOKIE.match(line):
            return match[1].decode()
    return ""


def _guessed(data: bytes, declared: str) -> tuple[str, str]:
    if _share_of_controls(data) > 0:
        raise NotText("it holds control characters and is not UTF-8")
    for name in filter(None, (declared, LAST_RESORT)):
        try:
            return data.decode(name), name.lower()
        except (LookupError, ValueError):  # no such encoding, no encoding of text, not in it
            continue
    raise NotText(f"it is neither UTF-8 nor {LAST_RESORT}")


def _share_of_controls(data: bytes) -> float:
    probe = data[:_PROBED]
    return 1 - len(probe.translate(None, _CONTROLS)) / len(probe) if probe else 0.0
