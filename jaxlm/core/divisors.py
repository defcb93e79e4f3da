"""Divisors of a number, and the divisors nearest to a given size."""

import math

TRIED = 100_000


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order.

    Above TRIED squared, return those up to TRIED and their cofactors.
    """
    small = [size for size in range(1, min(math.isqrt(number), TRIED) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def nearest(number: int, target: int) -> list[int]:
    """Return the divisors of a number, nearest to `target` first, the larger of two as near."""
    return sorted(divisors(number), key=lambda size: (abs(size - target), -size))


def neighbours(number: int, target: int) -> list[int]:
    """Return the divisors on both sides of `target`, the nearer first.

    There is one if `target` divides the number or exceeds it.
    """
    every = divisors(number)
    below = [size for size in every if size <= target][-1:]
    above = [size for size in every if size >= target][:1]
    return sorted({*below, *above}, key=lambda size: abs(size - target))
