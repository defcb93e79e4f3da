"""Arithmetic of sizes that families share."""


def gated_hidden(width: int) -> int:
    """Hidden units of a gated MLP with the parameters of a plain one of 4 x width: 8/3 of the width, rounded up to 64."""
    return -(-8 * width // 3 // 64) * 64


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of `number`, nearest to `wanted` first; of two as near, the larger."""
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    return sorted(divisors, key=lambda size: (abs(size - wanted), -size))
