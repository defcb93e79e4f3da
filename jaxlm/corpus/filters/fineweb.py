"""Rules that FineWeb added to those of Gopher and C4."""

from collections import Counter

from jaxlm.corpus.document import CorpusDocument, Removed, Stage
from jaxlm.corpus.filters.config import FineWeb
from jaxlm.corpus.filters.repetition import repeated

PUNCTUATION = ".", "!", "?", '"', "'", "\u201d", "\u2019", "\u3002", "\uff01", "\uff1f"


def fineweb(config: FineWeb) -> Stage:
    """Remove lists and menus: few lines with punctuation, repeated lines, short lines.

    Source: Penedo et al. 2024, arXiv:2406.17557, §3.6. Shares are of nonempty lines.
    """

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument | Removed:
        lines = [line.strip() for line in document.text.split("\n") if line.strip()]
        if not lines:
            return document
        punctuated = sum(line.endswith(PUNCTUATION) for line in lines) / len(lines)
        if punctuated <= config.punctuated:
            return Removed("punctuation", f"a share of {punctuated:.3f} of the lines")
        short = sum(len(line) < config.short_characters for line in lines) / len(lines)
        if short >= config.short:
            return Removed("short_lines", f"a share of {short:.3f} of the lines")
        _, duplicated = repeated(lines)
        if duplicated >= config.duplicated:
            return Removed("duplicated_lines", f"a share of {duplicated:.3f} of the characters")
        return document

    return stage
