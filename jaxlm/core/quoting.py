"""Text from outside, made fit to be shown: nothing in it drives a terminal, fills a log, or gives a password away."""

import re

MOST_BYTES = 2000  # of one piece of text in an error, a log or a preview

# Control characters but line ends and tabs, halves of surrogate pairs, and what turns the direction of text or hides it.
CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\U000e0000-\U000e007f]"
)
_USER_INFO = re.compile(r"(?<=://)[^\s/?#]+@")
_QUERY = re.compile(
    r"(?i)(?<=[?&])((?:[\w.-]*[_-])?(?:token|secret|password|signature|credential|key|sig)=)[^&\s'\"]+"
)
# A token is a secret unless it is one of a tokenizer's.
_OURS = "".join(
    f"(?<!{name}_)" for name in ("max", "pad", "bos", "eos", "unk", "mask", "sep", "cls", "add")
)
_NAMED = re.compile(
    rf"(?i)((?<![a-z])(?:passw(?:or)?d|passphrase|secret|{_OURS}token|credentials?|(?:api|access|private|secret)[_-]?key)"
    r"['\"]?\s*=\s*['\"]?)[^\s'\"]+"
)


def printable(text: str) -> str:
    """The text with control characters spelt out, so that data cannot drive the terminal that shows it."""
    return CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def holds_secret(text: str) -> bool:
    """Whether a URL in the text carries a name, a password or a key."""
    return bool(_USER_INFO.search(text) or _QUERY.search(text))


def without_secret(text: str) -> str:
    """The text with what `holds_secret` looks for left out."""
    return _QUERY.sub(r"\1", _USER_INFO.sub("", text))


def redacted(text: str) -> str:
    """The text with stars for what URLs carry, and for what stands after `password=` and the like."""
    return _NAMED.sub(r"\1***", _QUERY.sub(r"\1***", _USER_INFO.sub("***@", text)))


def cut(text: str, most: int = MOST_BYTES) -> str:
    """The text, or as much of it as fits in `most` bytes and how much is missing."""
    if len(text) <= most // 4 or len(data := text.encode(errors="replace")) <= most:
        return text
    room = most - 40  # for what is said of the rest
    return f"{data[:room].decode(errors='ignore')} ... and {len(data) - room:,} more bytes"


def safe(text: str) -> str:
    """What an error or a log may say of text from outside."""
    return cut(redacted(printable(text)))
