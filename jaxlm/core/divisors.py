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
