"""Repeated runs of words at any position: fingerprints select documents, then runs are compared.

The fingerprint of a run of `words` words is the least hash among the runs of half that length in
it (winnowing). Documents that share a run share its fingerprint, so only documents that share one
are read again, and every run in them is compared whole. The result is exact, except for two runs
with equal 64-bit hashes.

Source: Schleimer, Wilkerson, Aiken 2003, "Winnowing: Local Algorithms for Document
Fingerprinting", §3. The cut is that of Lee et al. 2022, arXiv:2107.06499, §4.1, with words in lower
case as tokens; the first occurrence stays.
"""

import functools

import numpy as np

from jaxlm.corpus.config import Substrings
from jaxlm.corpus.ngrams import WORD, covered, hashed, occurred, runs

_NONE = np.zeros(0, np.uint64)


def fingerprints(text: str, config: Substrings) -> np.ndarray:
    """Return u64[n] unique fingerprints, in prose about 4 for `words` words.

    If the text repeats a run, its first fingerprint is included twice.
    """
    numbers = _numbers(text)
    prints = np.unique(_least(numbers, config))
    return np.concatenate([prints, prints[:1]]) if _repeated(numbers, config).any() else prints


class Finder:
    """Finds runs of words that occurred before, in any document.

    Memory: 24 bytes a word of shared runs.
    """

    def __init__(self, shared: np.ndarray, config: Substrings):
        self._shared, self._config = shared, config  # fingerprints that occur several times
        self._runs: list[np.ndarray] = []
        self._begins: list[np.ndarray] = []

    def add(self, text: str) -> None:
        """Add the next document: those of its runs that may occur elsewhere."""
        numbers = _numbers(text)
        candidates = np.isin(_least(numbers, self._config), self._shared)
        candidates |= _repeated(numbers, self._config)
        self._begins.append(np.flatnonzero(candidates))
        self._runs.append(runs(numbers, self._config.words)[candidates])

    def later(self, document: int) -> np.ndarray:
        """Return the words at which repeated runs begin, given the documents kept so far."""
        numbers, (_, seen) = self._runs_of(document), self._all
        return self._begins[document][seen[numbers] | occurred(numbers)]

    def keep(self, document: int) -> None:
        """Mark the runs of a kept document as seen."""
        self._all[1][self._runs_of(document)] = True

    def _runs_of(self, document: int) -> np.ndarray:
        begin = self._offsets[document]
        return self._all[0][begin : begin + len(self._begins[document])]

    @functools.cached_property
    def _all(self) -> tuple[np.ndarray, np.ndarray]:
        """Number the distinct runs; return each run's number, and whether a number was seen."""
        names, number = np.unique(np.concatenate([*self._runs, _NONE]), return_inverse=True)
        self._runs.clear()
        return number, np.zeros(len(names), bool)

    @functools.cached_property
    def _offsets(self) -> np.ndarray:
        return np.cumsum([0, *map(len, self._begins)])


def stretches(
    text: str, begins: np.ndarray, config: Substrings
) -> tuple[tuple[tuple[int, int], ...], float]:
    """Return the characters of the runs that begin at these words, joined, and their word share."""
    places = [match.span() for match in WORD.finditer(text)]
    is_in = covered(begins, config.words, len(places) + 1)  # a word more, which is in no run
    turns = np.flatnonzero(np.diff(is_in, prepend=False)).reshape(-1, 2).tolist()
    ranges = tuple((places[first][0], places[end - 1][1]) for first, end in turns)
    return ranges, float(is_in.sum()) / max(1, len(places))


def _numbers(text: str) -> np.ndarray:
    """Hash each word. Lower-casing after splitting keeps the positions of words."""
    return hashed(map(str.lower, WORD.findall(text)))


def _least(numbers: np.ndarray, config: Substrings) -> np.ndarray:
    """Return u64[runs]: the fingerprint of each run of `words` words."""
    short = (config.words + 1) // 2
    hashes = runs(numbers, short)
    width = config.words - short + 1
    if len(hashes) < width:
        return _NONE
    return np.lib.stride_tricks.sliding_window_view(hashes, width).min(axis=1)


def _repeated(numbers: np.ndarray, config: Substrings) -> np.ndarray:
    """Return bool[runs]: if a run of `words` words occurs several times in the document."""
    hashes = runs(numbers, config.words)
    _, number, count = np.unique(hashes, return_inverse=True, return_counts=True)
    return (count > 1)[number]
