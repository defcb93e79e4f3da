"""Hashes of words and of runs of words (n-grams): 64 bits, the same on every machine.

Two runs collide with probability 2^-64; among n runs about n^2 / 2^65 pairs, 3% for a billion.
"""

import functools
import hashlib
import re
from collections.abc import Iterable

import numpy as np

WORD = re.compile(r"\w+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, made odd


def words(text: str) -> list[str]:
    """Return the words of a text in lower case: letters, digits and underscores.

    Example:
      >>> len(runs(hashed(words("To be, or not to be")), 2))
      5
    """
    return WORD.findall(text.lower())


def hashed(words: Iterable[str]) -> np.ndarray:
    """Hash each word."""
    return np.fromiter(map(_number, words), np.uint64)


def runs(numbers: np.ndarray, length: int) -> np.ndarray:
    """Hash each of the len(numbers) - length + 1 runs of `length` words; none if that is < 1."""
    count = max(0, len(numbers) - length + 1)
    total = np.zeros(count, np.uint64)
    for start in range(length):
        total = total * _FACTOR + numbers[start : start + count]
    return mixed(total)


def occurred(hashes: np.ndarray) -> np.ndarray:
    """Return bool[n]: true for each hash that occurs earlier in the array."""
    later = np.ones(len(hashes), bool)
    later[np.unique(hashes, return_index=True)[1]] = False
    return later


def covered(begins: np.ndarray, length: int, size: int) -> np.ndarray:
    """Return bool[size]: true for each word in a run of `length` words that starts at `begins`."""
    edges = np.zeros(size + 1, np.int64)
    edges[begins] += 1
    edges[begins + length] -= 1
    return np.cumsum(edges)[:-1] > 0


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Mix the bits of each number; a bijection.

    Source: Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators": SplitMix64.
    """
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


@functools.lru_cache(2**18)
def _number(word: str) -> int:
    digest = hashlib.blake2b(word.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
