"""Gopher's quality rules."""

from collections import Counter

from jaxlm.corpus.document import CorpusDocument, Removed, Stage
from jaxlm.corpus.filters.config import Gopher

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
BULLETS = "•", "‣", "◦", "●", "▪", "-", "*"
ELLIPSES = "...", "…"


def gopher(config: Gopher) -> Stage:
    """Remove documents by number and length of words, symbols, bullets, ellipses and stop words.

    Source: Rae et al. 2021, arXiv:2112.11446, §A.1.1 "Quality Filtering". Words are separated by
    white space. `symbols` applies to each symbol alone, as in the source, which does not list the
    characters that are bullets.
    """

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument | Removed:
        text = document.text
        words = text.split()
        count = len(words)
        if not config.words_least <= count <= config.words_most:
            return Removed("words", f"{count} words")
        if not count:
            return document
        mean = sum(map(len, words)) / count
        if not config.word_length_least <= mean <= config.word_length_most:
            return Removed("word_length", f"a mean of {mean:.2f} characters")
        symbols = {"#": text.count("#"), "ellipses": sum(map(text.count, ELLIPSES))}
        for name, count_of_symbol in symbols.items():
            if count_of_symbol > config.symbols * count:
                return Removed("symbols", f"{count_of_symbol} {name} in {count} words")
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        bullets = sum(line.startswith(BULLETS) for line in lines)
        if bullets > config.bullets * len(lines):
            return Removed("bullets", f"{bullets} of {len(lines)} lines")
        ellipses = sum(line.endswith(ELLIPSES) for line in lines)
        if ellipses > config.ellipses * len(lines):
            return Removed("ellipses", f"{ellipses} of {len(lines)} lines")
        alphabetic = sum(any(map(str.isalpha, word)) for word in words)
        if alphabetic < config.alphabetic * count:
            return Removed("alphabetic", f"{alphabetic} of {count} words")
        # Stop words are frequent, so few words are examined.
        stop_words = set[str]()
        for word in words:
            if len(stop_words) >= config.stop_words:
                break
            if (plain := word.strip(".,;:!?\"'()").lower()) in STOP_WORDS:
                stop_words.add(plain)
        if len(stop_words) < config.stop_words:
            return Removed("stop_words", f"{len(stop_words)} of the eight")
        return document

    return stage
