"""Runs of words as 64-bit numbers, the same on every machine and in every process.

Two different runs get one number with a probability of 2^-64: among n of them one such pair is there with about n^2 / 2^65,
3% for a billion.
"""

import functools
import hashlib
import re
from collections.abc import Iterable

import numpy as np

_WORD = re.compile(r"\w+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, made odd


def words(text: str) -> list[str]:
    """The words of a text in lower case: letters, digits and underscores; all between them is ignored."""
    return _WORD.findall(text.lower())


def hashed(words: Iterable[str]) -> np.ndarray:
    """A number for each word."""
    return np.fromiter(map(_number, words), np.uint64)


def runs(numbers: np.ndarray, length: int) -> np.ndarray:
    """A number for each run of `length` words, of which there are len(numbers) - length + 1; none where that is below 1."""
    count = max(0, len(numbers) - length + 1)
    total = np.zeros(count, np.uint64)
    for start in range(length):
        total = total * _FACTOR + numbers[start : start + count]
    return mixed(total)


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Each number spread over all 64 bits; no two become one.

    Source: Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators", the finaliser of SplitMix64.
    """
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


@functools.lru_cache(2**18)
def _number(word: str) -> int:
    digest = hashlib.blake2b(word.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
