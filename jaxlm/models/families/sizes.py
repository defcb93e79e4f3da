"""Sizes that families share: their arithmetic, and what must hold between them."""

from collections.abc import Iterator
from typing import Literal, Protocol

from jaxlm.core import divisors


def gated_hidden(width: int) -> int:
    """Hidden units of a gated MLP with the parameters of a plain one of 4 x width: 8/3 of the width, rounded up to 64."""
    return -(-8 * width // 3 // 64) * 64


def uneven(whole: str, size: int, part: str, parts: int) -> Iterator[tuple[str, str, str]]:
    """Where a size does not come apart evenly: the setting `part`, why, and a flag with the nearest that would do."""
    if size % parts:
        yield (
            part,
            f"{whole} = {size} does not divide by {part} = {parts}",
            f"--config.model.{part}={divisors.nearest(size, parts)[0]}",
        )


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
    is_cut = config.head_dim == "auto"
    found = list(uneven("width", config.width, "heads", config.heads)) if is_cut else []
    yield from found
    if not found and config.size_of_head % 2:
        yield (
            "head_dim",
            f"a head of {config.size_of_head} cannot be rotated in pairs",
            f"--config.model.head_dim={config.size_of_head + 1}",
        )
    yield from uneven("heads", config.heads, "kv_heads", config.kv_heads)
