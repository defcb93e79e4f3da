"""Gopher's repetition rules."""

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from jaxlm.corpus.document import CorpusDocument, Removed, Stage
from jaxlm.corpus.filters.config import Repetition
from jaxlm.corpus.ngrams import hashed, runs

_PARAGRAPHS = re.compile(r"\n\s*\n")


def repetition(config: Repetition) -> Stage:
    """Remove documents with a large share of repeated lines, paragraphs or runs of words.

    Source: Rae et al. 2021, arXiv:2112.11446, table A1. First occurrences are not counted, so a
    share is what could be cut out. Characters are those of words, without spaces; a word in two
    runs counts once.
    """

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument | Removed:
        for rule, share, most in _shares(document.text, config):
            if share > most:
                return Removed(rule, f"a share of {share:.3f}")
        return document

    return stage


def repeated(pieces: list[str]) -> tuple[float, float]:
    """Return the share of pieces that occurred before, and their share of characters."""
    seen = set[str]()
    count = characters = 0
    for piece in pieces:
        if piece in seen:
            count += 1
            characters += len(piece)
        seen.add(piece)
    return count / max(1, len(pieces)), characters / max(1, sum(map(len, pieces)))


def _shares(text: str, config: Repetition) -> Iterator[tuple[str, float, float]]:
    """Yield each rule, the share in the text, and its limit; cheap rules first."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    share, characters = repeated(lines)
    yield "lines", share, config.lines
    yield "line_characters", characters, config.line_characters
    share, characters = repeated([part.strip() for part in _PARAGRAPHS.split(text) if part.strip()])
    yield "paragraphs", share, config.paragraphs
    yield "paragraph_characters", characters, config.paragraph_characters
    words = text.split()
    sizes = np.fromiter(map(len, words), np.int64, len(words))
    total = max(1, int(sizes.sum()))
    numbers = hashed(words)
    for length, most in enumerate(config.top, 2):
        yield f"top_{length}_gram", top_share(numbers, sizes, length, total), most
    for length, most in enumerate(config.repeated, 5):
        hashes = runs(numbers, length)
        later = np.ones(len(hashes), bool)
        later[np.unique(hashes, return_index=True)[1]] = False
        yield f"repeated_{length}_grams", _covered(later, sizes, length) / total, most


def top_share(numbers: np.ndarray, sizes: np.ndarray, length: int, total: int) -> float:
    """Return the share of characters in the most frequent run; 0 if all occur once.

    Of equally frequent runs, the first counts.
    """
    hashes = runs(numbers, length)
    if not len(hashes):
        return 0.0
    values, first, count = np.unique(hashes, return_index=True, return_counts=True)
    if count.max() == 1:
        return 0.0
    top = min(np.flatnonzero(count == count.max()), key=lambda run: first[run])
    return _covered(hashes == values[top], sizes, length) / total


def _covered(starts: np.ndarray, sizes: np.ndarray, length: int) -> int:
    """Count the characters of words in runs of `length` words that begin at `starts`."""
    edges = np.zeros(len(sizes) + 1, np.int64)
    begins = np.flatnonzero(starts)
    edges[begins] += 1
    edges[begins + length] -= 1
    return int(sizes[np.cumsum(edges)[:-1] > 0].sum())
