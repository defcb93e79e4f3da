"""Sizes that come out even."""

import math

TRIED = 100_000


def divisors(number: int) -> list[int]:
    """Those of a positive number, smallest first; of one above TRIED squared, those up to TRIED and their counterparts."""
    small = [size for size in range(1, min(math.isqrt(number), TRIED) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def nearest(number: int, wanted: int) -> list[int]:
    """The divisors of a number, nearest to `wanted` first; of two as near, the larger."""
    return sorted(divisors(number), key=lambda size: (abs(size - wanted), -size))


def neighbours(number: int, wanted: int) -> list[int]:
    """The largest divisor up to `wanted` and the smallest from there on, the nearer first; one where it divides, or is too large."""
    every = divisors(number)
    below = [size for size in every if size <= wanted][-1:]
    above = [size for size in every if size >= wanted][:1]
    return sorted({*below, *above}, key=lambda size: abs(size - wanted))
