"""Ids of ASCII text by a byte-level tokenizer.json, from a cache of its words.

A byte-pair tokenizer cuts a text into words by a pattern, and the ids of a word depend on nothing
else. In ASCII text the pattern means the same to Python's `re` as to the tokenizers library, so
only distinct words are given to the library: a quarter of its processor time. Other text is left
to the library.
"""

import itertools
import os
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

MOST, LONGEST = 200_000, 50  # words and texts that are kept, and their characters; 40 MB
MOST_PROCESSORS = 2  # on more of them the library, which uses all, may take less time
ABSENT = "\ufdd0"  # a noncharacter, in place of a class without ASCII characters

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Parts of a pattern with one meaning for Oniguruma and for `re`.
_PROPERTY = r"\\[pP]\{\^?[A-Za-z]{1,2}\}"
_ESCAPE = r"\\(?:[sSdDwWrnt]|[^\w\s])"
_CLASS = rf"\[\^?(?:{_PROPERTY}|{_ESCAPE}|(?!&&|\|\||~~|--)[^\\\[\]])+\]"
_REPEAT = r"\{\d+(?:,\d*)?\}(?!\+)"
_PART = rf"{_CLASS}|{_PROPERTY}|{_ESCAPE}|\(\?(?:i?:|<?[=!])|{_REPEAT}|[^\\\[\](){{}}^$]|\)"
_PATTERN = re.compile(f"(?:{_PART})+")


class AsciiWords:
    """The words of a tokenizer, and their ids; `of` makes it.

    Args:
      patterns: Python's patterns, each with one group, that cut a text into words in turn.
      spelt: pattern of the texts that the tokenizer cuts out first.
      encode_word: returns the ids of a word.
    """

    def __init__(
        self,
        patterns: Sequence[re.Pattern[str]],
        spelt: re.Pattern[str],
        encode_word: Callable[[str], Sequence[int]],
    ):
        self._patterns, self._spelt = patterns, spelt
        self._words = _Cache(lambda word: np.array(encode_word(word), np.int32).tobytes())
        self._words[""] = b""  # between two words
        self._texts = _Cache(self._joined)

    @classmethod
    def of(
        cls, parsed: Mapping[str, Any], encode_word: Callable[[str], Sequence[int]]
    ) -> Self | None:
        """Return the words of a tokenizer.json; None if it has another form or this is no faster.

        Args:
          parsed: its content.
          encode_word: returns the ids of a word.
        """
        try:
            patterns = _patterns(parsed)
            added = parsed.get("added_tokens") or ()
            spelt = [re.escape(token["content"]) for token in added if not token.get("special")]
        except (TypeError, KeyError, AttributeError):  # the library reads lists for objects too
            return None
        if patterns is None or _processors() > MOST_PROCESSORS:
            return None
        return cls(patterns, re.compile("|".join(spelt) or "(?!)"), encode_word)

    def encode(self, text: str) -> bytes | None:
        """Return the ids of a text as int32; None for one that only the library encodes."""
        return self._texts[text]

    def _joined(self, text: str) -> bytes | None:
        if not text.isascii() or self._spelt.search(text):
            return None
        words = [text]
        for pattern in self._patterns:
            words = list(itertools.chain.from_iterable(_cut(pattern, text) for text in words))
        return b"".join(map(self._words.__getitem__, words))


class _Cache(dict[str, Any]):
    """Results for short texts that were seen before."""

    def __init__(self, function: Callable[[str], bytes | None]):
        super().__init__()
        self._function = function

    def __missing__(self, text: str) -> bytes | None:
        result = self._function(text)
        if len(text) <= LONGEST and len(self) < MOST and result is not None:
            self[text] = result
        return result


def _cut(pattern: re.Pattern[str], text: str) -> list[str]:
    """Return what the pattern matches in a text, and what is between; both are words."""
    words = pattern.findall(text)
    return words if sum(map(len, words)) == len(text) else pattern.split(text)


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processors() -> int:
    """Return how many processors the library uses."""
    return 1 if os.environ.get("TOKENIZERS_PARALLELISM") == "false" else processors()


def _patterns(parsed: Mapping[str, Any]) -> list[re.Pattern[str]] | None:
    """Return the patterns that cut ASCII text into words; None for another form of tokenizer.

    Unicode's normal forms do not change ASCII text.
    """
    model, normalizer = parsed["model"], parsed.get("normalizer") or {"type": "NFC"}
    step = parsed.get("pre_tokenizer") or {}
    *cuts, last = step.get("pretokenizers") or [step]
    flags = ("single_word", "lstrip", "rstrip")
    if (
        model.get("type") != "BPE"
        or model.get("dropout")
        or normalizer["type"] not in ("NFC", "NFD", "NFKC", "NFKD")
        or last.get("type") != "ByteLevel"
        or last.get("add_prefix_space", True)
        or any(token.get(flag) for token in parsed.get("added_tokens") or () for flag in flags)
    ):
        return None
    sources = [_source(cut) for cut in cuts]
    if last.get("use_regex", True):
        sources.append(_GPT2)
    patterns = [translated(source) for source in sources if source is not None]
    known = [pattern for pattern in patterns if pattern is not None]
    return known if known and len(known) == len(sources) else None


def _source(cut: Mapping[str, Any]) -> str | None:
    """Return the pattern of a pre-tokenizer; None for one that is not a pattern."""
    if cut["type"] == "Digits":
        return r"\p{N}" if cut.get("individual_digits") else r"\p{N}+"
    is_kept = cut["type"] == "Split" and cut["behavior"] == "Isolated" and not cut.get("invert")
    return cut["pattern"].get("Regex") if is_kept else None


def translated(source: str) -> re.Pattern[str] | None:
    """Return a pattern of Oniguruma for ASCII text, as one group; None if `re` may differ.

    A property of Unicode becomes the ASCII characters that have it.
    """
    if _PATTERN.fullmatch(source) is None:
        return None

    def part(match: re.Match[str]) -> str:
        if match[0].startswith("["):
            return re.sub(_PROPERTY, lambda inner: _with_property(inner[0]), match[0])
        return f"[{_with_property(match[0])}]"

    pattern = re.compile(f"({re.sub(f'{_CLASS}|{_PROPERTY}', part, source)})", re.ASCII)
    return None if pattern.fullmatch("") else pattern


def _with_property(part: str) -> str:
    """Return the ASCII characters of a category of Unicode, such as L or Lu, for a class."""
    name = part[3:-1].lstrip("^")
    is_inverse = (part[1] == "P") != ("^" in part)
    chosen = [
        re.escape(character)
        for character in map(chr, range(128))
        if unicodedata.category(character).startswith(name) != is_inverse
    ]
    return "".join(chosen) or ABSENT
