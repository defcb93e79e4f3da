"""Normalization of text: composed Unicode, uniform line ends, no invisible characters; mojibake."""

import re
import unicodedata
from collections import Counter

from jaxlm.core.errors import not_installed
from jaxlm.corpus.document import CorpusDocument, Stage

# Control characters except tab and line feed, zero-width space, word joiner, byte order mark.
# Joiners (U+200C, U+200D) are needed to write Persian, Hindi and emoji.
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2060\ufeff]")
_LINE_ENDS = re.compile(r"\r\n?|[\u2028\u2029\x0b\x0c\x85]")
_TRAILING = re.compile(r"[ \t\u00a0]+$", re.MULTILINE)
_EMPTY_LINES = re.compile(r"\n{4,}")
_LAST_LINES = re.compile(r"\n{2,}\Z")


def normalize() -> Stage:
    """Apply Unicode NFC (UAX #15) and line feeds; drop invisible characters and trailing spaces.

    At most two empty lines remain.
    """

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument:
        text = unicodedata.normalize("NFC", _LINE_ENDS.sub("\n", document.text))
        text, hidden = _INVISIBLE.subn("", text)
        text = _EMPTY_LINES.sub("\n\n\n", _TRAILING.sub("", text)).lstrip("\n")
        text = _LAST_LINES.sub("\n", text)
        if hidden:
            counts["normalize: invisible characters"] += hidden
        if text == document.text:
            return document
        counts["normalize: documents changed"] += 1
        return document.with_text(text)

    return stage


def mojibake() -> Stage:
    """Repair lines that were decoded in the wrong encoding. Raises InputMissing without ftfy.

    Source: Speer 2019, ftfy, `fix_encoding`, without its other changes.
    """
    try:
        import ftfy
    except ImportError as error:
        raise not_installed("the stage mojibake", "ftfy", "prepare", where="stages") from error

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument:
        if document.text.isascii():
            return document
        before = document.text.split("\n")
        after = [line if line.isascii() else ftfy.fix_encoding(line) for line in before]
        changed = sum(a != b for a, b in zip(after, before, strict=True))
        if not changed:
            return document
        counts["mojibake: lines changed"] += changed
        return document.with_text("\n".join(after))

    return stage
