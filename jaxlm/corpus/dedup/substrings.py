"""Runs of words that stood before, wherever they begin: fingerprints bring documents together, then every run is compared.

A document is known by fingerprints: of each run of `words` words the least number among the runs of half that length in it
(winnowing). Two documents that share a run share its fingerprint, so only those that share one are read again, and there each
run is compared as a whole. So nothing is missed, and nothing found that is not shared, but for two runs that get one number of
64 bits by accident.

Source: Schleimer, Wilkerson, Aiken 2003, "Winnowing: Local Algorithms for Document Fingerprinting", §3; what is cut is that of
Lee et al. 2022, arXiv:2107.06499, §4.1, with words in lower case for tokens, and the first place kept.
"""

import dataclasses
import functools
import re

import numpy as np

from jaxlm.corpus.dedup.config import Substrings
from jaxlm.corpus.ngrams import hashed, runs

_WORD = re.compile(r"\w+")
_NONE = np.zeros(0, np.uint64)


def fingerprints(text: str, config: Substrings) -> np.ndarray:
    """u64[n], each once: of prose about 4 for `words` words. A text that says a run twice has its first fingerprint twice."""
    numbers = _numbers(text)
    found = np.unique(_least(numbers, config))
    return np.concatenate([found, found[:1]]) if _repeated(numbers, config).any() else found


class Finder:
    """What of documents stood in those before them, or earlier in themselves. Memory: 24 bytes a word of shared runs."""

    def __init__(self, shared: np.ndarray, config: Substrings):
        self._shared, self._config = shared, config  # fingerprints that stand in several places
        self._runs: list[np.ndarray] = []
        self._begins: list[np.ndarray] = []

    def add(self, text: str) -> None:
        """The next document: those of its runs that may stand elsewhere."""
        numbers = _numbers(text)
        may = np.isin(_least(numbers, self._config), self._shared)
        may |= _repeated(numbers, self._config)
        self._begins.append(np.flatnonzero(may))
        self._runs.append(runs(numbers, self._config.words)[may])

    def later(self, document: int) -> np.ndarray:
        """Where runs begin in a document that stood before, as far as documents before it were kept."""
        mine, (_, seen) = self._mine(document), self._all
        again = np.ones(len(mine), bool)
        again[np.unique(mine, return_index=True)[1]] = False
        return self._begins[document][seen[mine] | again]

    def keep(self, document: int) -> None:
        """What is in a document that is kept stands before those that follow."""
        self._all[1][self._mine(document)] = True

    def _mine(self, document: int) -> np.ndarray:
        begin = self._offsets[document]
        return self._all[0][begin : begin + len(self._begins[document])]

    @functools.cached_property
    def _all(self) -> tuple[np.ndarray, np.ndarray]:
        """A small number for each run, by which it was seen or not."""
        names, number = np.unique(np.concatenate([*self._runs, _NONE]), return_inverse=True)
        self._runs.clear()
        return number, np.zeros(len(names), bool)

    @functools.cached_property
    def _offsets(self) -> np.ndarray:
        return np.cumsum([0, *map(len, self._begins)])


@dataclasses.dataclass(frozen=True)
class Stretches:
    """Where runs of words lie in a text, those that touch joined, and which share of its words is in them."""

    ranges: tuple[tuple[int, int], ...]  # of characters
    share: float


def stretches(text: str, begins: np.ndarray, config: Substrings) -> Stretches:
    """The words of the runs that begin at some of the words."""
    places = [match.span() for match in _WORD.finditer(text)]
    edges = np.zeros(len(places) + 1, np.int64)
    edges[begins] += 1
    edges[begins + config.words] -= 1
    is_in = np.cumsum(edges) > 0
    turns = np.flatnonzero(np.diff(is_in, prepend=False)).reshape(-1, 2).tolist()
    ranges = tuple((places[first][0], places[end - 1][1]) for first, end in turns)
    return Stretches(ranges, float(is_in.sum()) / max(1, len(places)))


def _numbers(text: str) -> np.ndarray:
    """A number for each word, in lower case once it is found: lower case can be longer, and these have places."""
    return hashed(map(str.lower, _WORD.findall(text)))


def _least(numbers: np.ndarray, config: Substrings) -> np.ndarray:
    """u64[runs]: the fingerprint of each run of `words` words."""
    short = (config.words + 1) // 2
    found = runs(numbers, short)
    width = config.words - short + 1
    if len(found) < width:
        return _NONE
    return np.lib.stride_tricks.sliding_window_view(found, width).min(axis=1)


def _repeated(numbers: np.ndarray, config: Substrings) -> np.ndarray:
    """bool[runs]: which runs of `words` words a document says more than once."""
    found = runs(numbers, config.words)
    _, number, count = np.unique(found, return_inverse=True, return_counts=True)
    return (count > 1)[number]
