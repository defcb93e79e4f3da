"""Sanitizing of text from outside: it cannot control a terminal, fill a log or show a password."""

import re

MAX_BYTES = 2000  # of one text in an error, a log or a preview

# Control characters except line ends and tabs, lone surrogates, and characters that change the
# direction of text or hide it.
CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    r"\ud800-\udfff\ufeff\U000e0000-\U000e007f]"
)
_USER_INFO = re.compile(r"(?<=://)[^\s/?#]+@")
_QUERY = re.compile(
    r"(?i)(?<=[?&])((?:[\w.-]*[_-])?(?:token|secret|password|signature|credential|key|sig)=)"
    r"[^&\s'\"]+"
)
# A token is a secret unless it belongs to a tokenizer.
_OURS = "".join(f"(?<!{name}_)" for name in "max pad bos eos unk mask sep cls add".split())
_NAMED = re.compile(
    rf"(?i)((?<![a-z])(?:passw(?:or)?d|passphrase|secret|{_OURS}token|credentials?"
    r"|(?:api|access|private|secret)[_-]?key)['\"]?\s*=\s*['\"]?)[^\s'\"]+"
)


def printable(text: str) -> str:
    """Return the text with control characters escaped, so that data cannot control a terminal."""
    return CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def holds_secret(text: str) -> bool:
    """Return True if a URL in the text contains a user name, a password or a key."""
    return bool(_USER_INFO.search(text) or _QUERY.search(text))


def without_secret(text: str) -> str:
    """Return the text without the secrets that `holds_secret` detects."""
    return _QUERY.sub(r"\1", _USER_INFO.sub("", text))


def redacted(text: str) -> str:
    """Return the text with stars for secrets in URLs and for values after `password=` etc."""
    return _NAMED.sub(r"\1***", _QUERY.sub(r"\1***", _USER_INFO.sub("***@", text)))


def cut(text: str, max_bytes: int = MAX_BYTES) -> str:
    """Return the text, or its first part within `max_bytes` and the number of bytes missing."""
    if len(text) <= max_bytes // 4 or len(data := text.encode(errors="replace")) <= max_bytes:
        return text
    room = max_bytes - 40  # for the note about the rest
    return f"{data[:room].decode(errors='ignore')} ... and {len(data) - room:,} more bytes"


def safe(text: str) -> str:
    """Return text from outside as an error or a log may show it."""
    return cut(redacted(printable(text)))
