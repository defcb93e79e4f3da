"""Gopher's rules of repetition."""

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from jaxlm.corpus.document import Document, Removed, Stage
from jaxlm.corpus.filters.config import Repetition
from jaxlm.corpus.ngrams import hashed, runs

_PARAGRAPHS = re.compile(r"\n\s*\n")


def repetition(config: Repetition) -> Stage:
    """Too large a share in lines, paragraphs or runs of words that are there more than once.

    Source: Rae et al. 2021, arXiv:2112.11446, table A1. Of what is repeated the first is not counted, so that a share is what
    could be cut out; characters of words are counted, not those between them, and those in two runs once.
    """

    def stage(document: Document, counts: Counter[str]) -> Document | Removed:
        for rule, share, most in _shares(document.text, config):
            if share > most:
                return Removed(rule, f"a share of {share:.3f}")
        return document

    return stage


def repeated(pieces: list[str]) -> tuple[float, float]:
    """The share of pieces that stood before, and of their characters in all."""
    seen = set[str]()
    count = characters = 0
    for piece in pieces:
        if piece in seen:
            count += 1
            characters += len(piece)
        seen.add(piece)
    return count / max(1, len(pieces)), characters / max(1, sum(map(len, pieces)))


def _shares(text: str, config: Repetition) -> Iterator[tuple[str, float, float]]:
    """Each rule, the share that the text has of it, and the largest allowed; cheap ones first."""
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
        found = runs(numbers, length)
        later = np.ones(len(found), bool)
        later[np.unique(found, return_index=True)[1]] = False
        yield f"repeated_{length}_grams", _covered(later, sizes, length) / total, most


def top_share(numbers: np.ndarray, sizes: np.ndarray, length: int, total: int) -> float:
    """The share of characters in the commonest run of `length` words; of equals the first. Nothing where all stand once."""
    found = runs(numbers, length)
    if not len(found):
        return 0.0
    values, first, count = np.unique(found, return_index=True, return_counts=True)
    if count.max() == 1:
        return 0.0
    top = min(np.flatnonzero(count == count.max()), key=lambda at: first[at])
    return _covered(found == values[top], sizes, length) / total


def _covered(starts: np.ndarray, sizes: np.ndarray, length: int) -> int:
    """The characters of all words that lie in a run of `length` that begins where `starts` is set."""
    edges = np.zeros(len(sizes) + 1, np.int64)
    at = np.flatnonzero(starts)
    edges[at] += 1
    edges[at + length] -= 1
    return int(sizes[np.cumsum(edges)[:-1] > 0].sum())
