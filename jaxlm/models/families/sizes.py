"""Sizes that families share: their arithmetic, and what must hold between them."""

import math
from collections.abc import Iterator
from typing import Literal, Protocol

TRIED = 100_000


def gated_hidden(width: int) -> int:
    """Hidden units of a gated MLP with the parameters of a plain one of 4 x width: 8/3 of the width, rounded up to 64."""
    return -(-8 * width // 3 // 64) * 64


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of `number`, nearest to `wanted` first; of two as near, the larger.

    Of a number above TRIED squared, those up to TRIED and their counterparts.
    """
    small = [size for size in range(1, min(math.isqrt(number), TRIED) + 1) if number % size == 0]
    divisors = {*small, *(number // size for size in small)}
    return sorted(divisors, key=lambda size: (abs(size - wanted), -size))


class Heads(Protocol):
    """What the settings of a family with grouped, rotated heads have in common."""

    @property
    def width(self) -> int:
        """Features of the residual stream."""
        ...

    @property
    def heads(self) -> int:
        """Query heads."""
        ...

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        ...

    @property
    def head_dim(self) -> int | Literal["auto"]:
        """Features of a head as set: `auto` is width / heads."""
        ...

    @property
    def size_of_head(self) -> int:
        """Features of a head."""
        ...


def head_problems(config: Heads) -> Iterator[tuple[str, str, str]]:
    """Heads share the width and the keys evenly, and rotate in pairs: where not, the setting, why, and a flag to paste."""
    if config.head_dim == "auto" and config.width % config.heads:
        fits = nearest_divisors(config.width, config.heads)
        yield (
            "heads",
            f"width = {config.width} does not divide by heads = {config.heads}",
            f"--config.model.heads={fits[0]}",
        )
    elif config.size_of_head % 2:
        yield (
            "head_dim",
            f"a head of {config.size_of_head} cannot be rotated in pairs",
            f"--config.model.head_dim={config.size_of_head + 1}",
        )
    if config.heads % config.kv_heads:
        fits = nearest_divisors(config.heads, config.kv_heads)
        yield (
            "kv_heads",
            f"heads = {config.heads} does not divide by kv_heads = {config.kv_heads}",
            f"--config.model.kv_heads={fits[0]}",
        )
